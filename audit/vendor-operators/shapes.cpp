// Shape inference of the kernels whose first phases ask for it, by what the kernels compute. The
// vendor's own is registered by the graph engine, which is not part of the harness.

#include <algorithm>
#include <cctype>
#include <set>
#include <string>
#include <vector>

#include "harness.h"
#include "opdev/op_arg_def.h"
#include "opdev/op_executor.h"
#include "opdev/shape_utils.h"

namespace {
using Axes = std::vector<int64_t>;

struct Kernel {
    std::string name;
    std::vector<const aclTensor *> inputs;
    std::vector<aclTensor *> outputs;
    std::vector<op::OpArg *> attributes;
    std::vector<const aclTensorList *> input_lists;
    std::vector<aclTensorList *> output_lists;

    Kernel(uint32_t type, op::OpArgList &in, op::OpArgList &out, op::OpArgList &attrs)
        : name(harness::Kernel(type))
    {
        in.VisitByNoReturn([&](size_t, op::OpArg &argument) {
            const bool is_tensor = argument.type == op::OpArgType::OPARG_ACLTENSOR;
            inputs.push_back(is_tensor ? static_cast<const aclTensor *>(argument->pointer)
                                       : nullptr);
            if (argument.type == op::OpArgType::OPARG_ACLTENSOR_LIST) {
                input_lists.push_back(static_cast<const aclTensorList *>(argument->pointer));
            }
        });
        out.VisitByNoReturn([&](size_t, op::OpArg &argument) {
            const bool is_tensor = argument.type == op::OpArgType::OPARG_ACLTENSOR;
            outputs.push_back(is_tensor ? static_cast<aclTensor *>(argument->pointer) : nullptr);
            if (argument.type == op::OpArgType::OPARG_ACLTENSOR_LIST) {
                output_lists.push_back(static_cast<aclTensorList *>(argument->pointer));
            }
        });
        attrs.VisitByNoReturn([&](size_t, op::OpArg &argument) {
            attributes.push_back(&argument);
        });
    }

    bool Begins(const char *text) const { return name.rfind(text, 0) == 0; }
    bool Contains(const char *text) const { return name.find(text) != std::string::npos; }

    std::vector<bool> Flags() const
    {
        std::vector<bool> flags;
        for (op::OpArg *attribute : attributes) {
            if (attribute->type == op::OpArgType::OPARG_BOOL) {
                flags.push_back(((*attribute)->ivalue & 0xff) != 0);
            }
        }
        return flags;
    }

    // The first string, in capitals.
    std::string Text() const
    {
        std::string text;
        for (op::OpArg *attribute : attributes) {
            if (attribute->type == op::OpArgType::OPARG_STRING && text.empty()) {
                text = static_cast<const char *>((*attribute)->pointer);
            }
        }
        std::transform(text.begin(), text.end(), text.begin(), ::toupper);
        return text;
    }

    Axes Numbers() const
    {
        Axes numbers;
        for (op::OpArg *attribute : attributes) {
            if (attribute->type == op::OpArgType::OPARG_INT) {
                numbers.push_back((*attribute)->ivalue);
            }
        }
        return numbers;
    }
};

// The integers of a tensor in host memory.
Axes HostIntegers(const aclTensor *tensor)
{
    Axes values;
    const void *data = tensor->GetStorageAddr();
    for (int64_t i = 0; data != nullptr && i < tensor->Size(); i++) {
        const bool is_short = tensor->GetDataType() == ge::DT_INT32;
        values.push_back(is_short ? static_cast<const int32_t *>(data)[i]
                                  : static_cast<const int64_t *>(data)[i]);
    }
    return values;
}

void Give(aclTensor *tensor, const op::Shape &shape)
{
    if (tensor != nullptr) {
        tensor->SetOriginalShape(shape);
        tensor->SetStorageShape(shape);
        tensor->SetViewShape(shape);
    }
}

op::Shape Reduced(const op::Shape &x, const Axes &axes, bool keeps)
{
    op::Shape shape;
    const int64_t rank = x.GetDimNum();
    for (int64_t i = 0; i < rank; i++) {
        const bool is_reduced = std::any_of(axes.begin(), axes.end(), [&](int64_t axis) {
            return (axis < 0 ? axis + rank : axis) == i;
        });
        if (!is_reduced) {
            shape.AppendDim(x.GetDim(i));
        } else if (keeps) {
            shape.AppendDim(1);
        }
    }
    return shape;
}

op::Shape Product(const op::Shape &x, const op::Shape &y, const std::vector<bool> &transposed)
{
    op::Shape shape;
    const int64_t x_rank = x.GetDimNum();
    const int64_t y_rank = y.GetDimNum();
    for (int64_t i = 0; i + 2 < x_rank; i++) {
        shape.AppendDim(std::max(x.GetDim(i), i + 2 < y_rank ? y.GetDim(i) : 1));
    }
    const bool is_x_transposed = !transposed.empty() && transposed[0];
    const bool is_y_transposed = transposed.size() > 1 && transposed[1];
    shape.AppendDim(x.GetDim(x_rank - (is_x_transposed ? 1 : 2)));
    shape.AppendDim(y.GetDim(y_rank - (is_y_transposed ? 2 : 1)));
    return shape;
}

// The axis of the tokens in a layout of attention, or -1 if it is none.
int TokenAxis(const std::string &layout)
{
    static const std::set<std::string> layouts = {"BSH", "BSND", "SBH", "BNSD", "TND"};
    return layouts.count(layout) == 0 ? -1 : layout.find_first_of("ST");
}

// Attention: two of statistics of each row, one that is not written, and the result.
bool GiveAttention(const Kernel &kernel)
{
    const std::string layout = kernel.Text();
    const int tokens = TokenAxis(layout);
    if (tokens < 0) {
        return false;
    }
    const op::Shape q = kernel.inputs[0]->GetViewShape();
    const op::Shape v = kernel.inputs[2]->GetViewShape();
    const int64_t heads = kernel.Numbers()[2];
    op::Shape statistics;
    if (layout != "TND") {
        statistics.AppendDim(q.GetDim(layout.find('B')));
        statistics.AppendDim(heads);
    }
    statistics.AppendDim(q.GetDim(tokens));
    if (layout == "TND") {
        statistics.AppendDim(heads);
    }
    statistics.AppendDim(8);
    op::Shape result = q;
    const size_t last = layout.size() - 1;
    int64_t channels = v.GetDim(last);
    if (layout.back() == 'H') {
        const int64_t head = heads == 0 ? 0 : q.GetDim(last) / heads;
        const int64_t kv_heads = head == 0 ? 0 : kernel.inputs[1]->GetViewShape().GetDim(last) / head;
        channels = kv_heads == 0 ? 0 : heads * (channels / kv_heads);
    }
    result.SetDim(last, channels);
    Give(kernel.outputs[0], statistics);
    Give(kernel.outputs[1], statistics);
    Give(kernel.outputs[2], op::Shape({0, 0, 0, 0}));
    Give(kernel.outputs[3], result);
    return true;
}

// Its gradients have the shapes of what they are the gradients of.
bool GiveAttentionGradients(const Kernel &kernel)
{
    if (TokenAxis(kernel.Text()) < 0) {
        return false;
    }
    for (size_t i = 0; i < 3; i++) {
        Give(kernel.outputs[i], kernel.inputs[i]->GetViewShape());
    }
    const aclTensor *added = kernel.inputs[4];
    const bool is_added = added != nullptr && added->Size() != 0;
    Give(kernel.outputs[3], is_added ? added->GetViewShape() : op::Shape({0}));
    return true;
}

// The shape of all outputs. A kernel that is not known here is taken for one element by element,
// and noted.
op::Shape Infer(const Kernel &kernel)
{
    const op::Shape x = kernel.inputs[0]->GetViewShape();
    const aclTensor *second = kernel.inputs.size() > 1 ? kernel.inputs[1] : nullptr;
    op::Shape shape;
    if (kernel.Begins("Reduce") || kernel.Begins("Arg")) {
        const std::vector<bool> flags = kernel.Flags();
        Axes axes = kernel.Numbers();
        axes.resize(std::min<size_t>(axes.size(), 1));
        return Reduced(x, second != nullptr ? HostIntegers(second) : axes,
                       !flags.empty() && flags[0]);
    }
    if (kernel.name == "BroadcastTo" || kernel.name == "Slice") {
        const Axes sizes = HostIntegers(kernel.inputs[kernel.name == "Slice" ? 2 : 1]);
        for (size_t i = 0; i < sizes.size(); i++) {
            shape.AppendDim(sizes[i] < 0 ? x.GetDim(i) : sizes[i]);
        }
        return shape;
    }
    if (kernel.name == "Pad") {
        const Axes sizes = HostIntegers(second);
        for (size_t i = 0; 2 * i + 1 < sizes.size(); i++) {
            shape.AppendDim(x.GetDim(i) + sizes[2 * i] + sizes[2 * i + 1]);
        }
        return shape;
    }
    if (kernel.name == "Transpose") {
        for (const int64_t axis : HostIntegers(second)) {
            shape.AppendDim(x.GetDim(axis));
        }
        return shape;
    }
    if (kernel.Contains("MatMul") || kernel.Contains("Gemm")) {
        return Product(x, second->GetViewShape(), kernel.Flags());
    }
    static const std::set<std::string> pointwise = {"AxpyV2", "ClipByValueV2", "Mul"};
    if (pointwise.count(kernel.name) == 0) {
        harness::Undefined(("shape of " + kernel.name).c_str());
    }
    if (second != nullptr && op::BroadcastInferShape(x, second->GetViewShape(), shape)) {
        return shape;
    }
    return x;
}

// Products of groups, in one tensor or in several. Factors that are stored transposed come so.
bool GiveGroups(const Kernel &kernel)
{
    if (kernel.input_lists.size() < 2 || kernel.output_lists.size() != 1) {
        return false;
    }
    const aclTensorList &x = *kernel.input_lists[0], &weight = *kernel.input_lists[1];
    aclTensorList &out = *kernel.output_lists[0];
    const std::vector<bool> flags = kernel.Flags();
    const Axes numbers = kernel.Numbers();
    if (flags.size() < 2 || numbers.size() < 3) {
        return false;
    }
    const auto last = [](const aclTensor *factor, bool transposed, size_t from_end) {
        const op::Shape &shape = factor->GetViewShape();
        const size_t axis = transposed ? 3 - from_end : from_end;
        return shape.GetDim(shape.GetDimNum() - axis);
    };
    for (uint64_t i = 0; i < out.Size(); i++) {
        const aclTensor *left = x[std::min(i, x.Size() - 1)];
        const aclTensor *right = weight[std::min(i, weight.Size() - 1)];
        op::Shape shape;
        if (numbers[2] == 2) {
            const aclTensor *groups = nullptr;
            for (const aclTensor *input : kernel.inputs) {
                groups = input != nullptr ? input : groups;
            }
            if (groups == nullptr) {
                return false;
            }
            shape.AppendDim(groups->GetViewShape().GetDim(0));
        }
        shape.AppendDim(last(left, flags[1], 2));
        shape.AppendDim(last(right, flags[0], 1));
        Give(out[i], shape);
    }
    return true;
}
}  // namespace

aclnnStatus InferShape(uint32_t type, op::OpArgList &in, op::OpArgList &out, op::OpArgList &attrs)
{
    const Kernel kernel(type, in, out, attrs);
    if (kernel.name == "GroupedMatmul") {
        return GiveGroups(kernel) ? ACLNN_SUCCESS : ACLNN_ERR_PARAM_INVALID;
    }
    if (kernel.inputs.empty() || kernel.inputs[0] == nullptr) {
        return ACLNN_ERR_INNER_NULLPTR;
    }
    if (kernel.name == "FlashAttentionScore") {
        return GiveAttention(kernel) ? ACLNN_SUCCESS : ACLNN_ERR_PARAM_INVALID;
    }
    if (kernel.name == "FlashAttentionScoreGrad") {
        return GiveAttentionGradients(kernel) ? ACLNN_SUCCESS : ACLNN_ERR_PARAM_INVALID;
    }
    const op::Shape shape = Infer(kernel);
    for (aclTensor *output : kernel.outputs) {
        Give(output, shape);
    }
    return ACLNN_SUCCESS;
}

namespace op::internal {
aclnnStatus UpdateOutputShape(aclTensor *tensor)
{
    const op::Shape shape = tensor->GetOriginalShape();
    tensor->SetStorageShape(shape);
    tensor->SetViewShape(shape);
    return ACLNN_SUCCESS;
}
aclnnStatus UpdateOutputShape(aclTensorList *list)
{
    for (uint64_t i = 0; i < list->Size(); i++) {
        UpdateOutputShape((*list)[i]);
    }
    return ACLNN_SUCCESS;
}
}  // namespace op::internal
