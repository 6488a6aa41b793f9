// What the vendor's first phases call outside of themselves: platform, log, tracing, launches.
// Nothing here reaches a device: a kernel that is launched is noted by name.

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "harness.h"
#include "opdev/aicpu/aicpu_task.h"
#include "opdev/make_op_executor.h"
#include "opdev/op_dfx.h"
#include "opdev/op_log.h"
#include "opdev/platform.h"
#include "thread_local_context.h"

namespace {
constexpr int kErrorLevel = 3;
constexpr int kEventLevel = 16;
constexpr size_t kLogBytes = 4096;

struct Notes {
    std::string log;
    std::string launches;
    std::string undefined;
};

Notes g_notes;

void Add(std::string &list, const std::string &entry)
{
    list += (list.empty() ? "" : ",") + entry;
}

std::vector<std::string> &Kernels()
{
    static std::vector<std::string> names;
    return names;
}

// "910B" unless the environment names another.
op::SocVersion Soc()
{
    const char *named = std::getenv("VENDOR_OPERATORS_SOC");
    const bool is_a3 = named != nullptr && std::string(named) == "910_93";
    return is_a3 ? op::SocVersion::ASCEND910_93 : op::SocVersion::ASCEND910B;
}
}  // namespace

namespace harness {
void Undefined(const char *symbol)
{
    if (g_notes.undefined.find(symbol) == std::string::npos) {
        Add(g_notes.undefined, symbol);
    }
}

std::string Kernel(uint32_t id)
{
    return id > 0 && id <= Kernels().size() ? Kernels()[id - 1] : "unknown";
}
}  // namespace harness

extern "C" {
void harness_reset() { g_notes = Notes(); }
const char *harness_log() { return g_notes.log.c_str(); }
const char *harness_launches() { return g_notes.launches.c_str(); }
const char *harness_undefined() { return g_notes.undefined.c_str(); }
}

// Log: errors are kept, whose first line says where a call was refused.
int CheckLogLevel(int, int level) { return level >= kErrorLevel && level < kEventLevel; }
void DlogVaList(int, int, const char *format, va_list arguments)
{
    char line[1024];
    vsnprintf(line, sizeof line, format, arguments);
    if (g_notes.log.size() < kLogBytes) {
        g_notes.log += std::string(line) + "\n";
    }
}
void DlogRecord(int, int, const char *, ...) {}

namespace error_message {
int32_t ReportPredefinedErrMsg(const char *, const std::vector<const char *> &,
                               const std::vector<const char *> &)
{
    return 0;
}
int32_t RegisterFormatErrorMessage(const char *, unsigned long) { return 0; }
void ReportInnerErrMsg(const char *, const char *, uint32_t, const char *, const char *, ...) {}
}  // namespace error_message

namespace op {
// Platform: the numbers of Atlas A2 and A3.
PlatformInfo::~PlatformInfo() {}
SocVersion PlatformInfo::GetSocVersion() const { return Soc(); }
const std::string &PlatformInfo::GetSocLongVersion() const
{
    static const std::string a2 = "Ascend910B1";
    static const std::string a3 = "Ascend910_9392";
    return Soc() == SocVersion::ASCEND910B ? a2 : a3;
}
int32_t PlatformInfo::GetDeviceId() const { return 0; }
bool PlatformInfo::CheckSupport(SocSpec, SocSpecAbility) const { return true; }
int64_t PlatformInfo::GetBlockSize() const { return 32; }
uint32_t PlatformInfo::GetCubeCoreNum() const { return 24; }
uint32_t PlatformInfo::GetVectorCoreNum() const { return 48; }
bool PlatformInfo::Valid() const { return true; }
bool PlatformInfo::GetFftsPlusMode() const { return true; }
NpuArch PlatformInfo::GetCurNpuArch() const { return NpuArch::DAV_2201; }
fe::PlatFormInfos *PlatformInfo::GetPlatformInfos() const { return nullptr; }
const PlatformInfo &GetCurrentPlatformInfo()
{
    static const PlatformInfo *platform = new PlatformInfo(0);
    return *platform;
}
ge::AscendString ToString(SocVersion version)
{
    return ge::AscendString(version == SocVersion::ASCEND910B ? "Ascend910B" : "Ascend910_93");
}

// Tracing of calls: none.
OpDfxGuard::OpDfxGuard(const char *, int, OpLevel, const char *) {}
OpDfxGuard::OpDfxGuard(uint64_t, DfxProfilingType) {}
OpDfxGuard::~OpDfxGuard() {}
// Names of the arguments, as many as any operator has.
void OpDfxGuard::StringToVec(const char *, std::vector<std::string> &names)
{
    names.assign(64, "");
}
void OpDfxGuard::StringToVecWithBrackets(const char *, std::vector<std::string> &names)
{
    names.assign(64, "");
}
bool IsDumpEnabled() { return false; }
void InitThreadLocalContext() {}
OpDfxProfiler *CreateDfxProfiler(const char *) { return nullptr; }
OpDfxProfiler *CreateDfxProfiler(uint32_t) { return nullptr; }
void AddInputTensorToThreadLocalCtx(const aclTensor *const) {}
void AddInputTensorToThreadLocalCtx(aclTensor *const) {}
void AddInputTensorToThreadLocalCtx(const aclTensorList *const) {}
void AddInputTensorToThreadLocalCtx(aclTensorList *const) {}
void AddOutputTensorToThreadLocalCtx(const aclTensor *const) {}
void AddOutputTensorToThreadLocalCtx(aclTensor *const) {}
void AddOutputTensorToThreadLocalCtx(const aclTensorList *const) {}
void AddOutputTensorToThreadLocalCtx(aclTensorList *const) {}
ge::AscendString ToString(const std::string &text) { return ge::AscendString(text.c_str()); }
aclnnStatus CheckPhase1Params(aclOpExecutor **executor, uint64_t *workspace)
{
    const bool complete = executor != nullptr && workspace != nullptr;
    return complete ? ACLNN_SUCCESS : ACLNN_ERR_PARAM_NULLPTR;
}
uint32_t GenOpTypeId(const char *name)
{
    for (size_t i = 0; i < Kernels().size(); i++) {
        if (Kernels()[i] == name) {
            return i + 1;
        }
    }
    Kernels().push_back(name);
    return Kernels().size();
}

namespace internal {
OpProfilingSwitch::OpProfilingSwitch()
    : reportFlag(false), kernelLaunchFlag(false), additionInfoFlag(false), recordOpArgFlag(false),
      level2ProfilingFlag(false), timeStampFlag(false)
{
}
OpProfilingSwitch opProfilingSwitch;
bool g_aclnnDebugEnabled = false;
void InitAclnnDebugSwitch() {}
bool GetOpProfilingRecordArgFlag() { return false; }
std::string GetLogApiInfo() { return ""; }
uint64_t OpGetLogSequence() { return 0; }
uint64_t GenSummaryItemId(const char *, const char *, const char *) { return 0; }
uint64_t GenKernelLauncherId(const char *) { return 0; }
// With its cache full, no call is taken from the cache.
OpThreadLocalContext &GetThreadLocalContext()
{
    static thread_local OpThreadLocalContext context;
    context.cacheHasFull_ = true;
    return context;
}

// Launches.
aclnnStatus CreatAicpuKernelLauncher(uint32_t kernel, AicpuTaskSpace &, aclOpExecutor *,
                                     const FVector<std::string> &, OpArgContext *arguments)
{
    Add(g_notes.launches, harness::Kernel(kernel) + ":AI CPU");
    DestroyOpArgContext(arguments);
    return ACLNN_SUCCESS;
}
}  // namespace internal
}  // namespace op

aclnnStatus CreatAiCoreKernelLauncher(const char *name, uint32_t, aclOpExecutor *,
                                      op::OpArgContext *arguments)
{
    Add(g_notes.launches, std::string(name) + ":AI Core");
    op::DestroyOpArgContext(arguments);
    return ACLNN_SUCCESS;
}
void InitL2Phase1Context(const char *, aclOpExecutor **) {}
void InitL2Phase2Context(const char *, aclOpExecutor *) {}
void InitL0Context(const char *, aclOpExecutor *) {}

// Runtime.
extern "C" {
aclError aclrtGetDevice(int32_t *device)
{
    *device = 0;
    return 0;
}
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t *value)
{
    *value = 0;
    return 0;
}
const char *aclrtGetSocName() { return "Ascend910B1"; }
int aclnnGetPytorchRandom(...) { return 0; }
char *mmSysGetEnv(int) { return nullptr; }
}

namespace Adx {
enum class DumpType : int32_t;
uint64_t AdumpGetDumpSwitch(DumpType) { return 0; }
}  // namespace Adx
