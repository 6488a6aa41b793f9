//! Views of many tensors at once. On a device that a server runs, each of burn's slices and reshapes
//! is a message, which costs as much as one of an operator.

use burn::backend::{Backend, Dispatch, DispatchTensor, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Slice, Tensor};

#[cfg(feature = "remote")]
use crate::error::AttentionError;
use crate::error::{Result, equal};

/// Adjacent elements of a tensor, in a shape of their own.
#[derive(Clone, Debug, PartialEq)]
struct View {
    /// Its index.
    tensor: usize,
    /// The first element.
    start: usize,
    shape: Shape,
}

/// Returns the elements of float tensors, each in one dimension.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let x = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &Device::flex());
/// let flat = burn_attention::flattened(vec![x.into_dispatch()]);
/// assert_eq!(flat[0].dims(), [4]);
/// ```
pub fn flattened(tensors: Vec<DispatchTensor>) -> Vec<Tensor<1>> {
    let whole = |(tensor, x): (usize, &DispatchTensor)| View {
        tensor,
        start: 0,
        shape: [x.shape().num_elements()].into(),
    };
    let views = tensors.iter().enumerate().map(whole).collect();
    let flat = take(tensors, views).into_iter();
    flat.map(Tensor::from_dispatch).collect()
}

/// Divides the elements of a flat tensor into tensors of these shapes, in order.
///
/// # Errors
/// [`Size`](AttentionError::Size) if the shapes have not as many elements.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let x = Tensor::<1>::from_floats([1.0, 2.0, 3.0, 4.0], &Device::flex());
/// let parts = burn_attention::divided(x, &[[1, 1], [1, 3]])?;
/// assert_eq!(parts[1].to_data().iter::<f32>().collect::<Vec<_>>(), [2.0, 3.0, 4.0]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn divided<const D: usize>(flat: Tensor<1>, shapes: &[[usize; D]]) -> Result<Vec<Tensor<D>>> {
    let [elements] = flat.dims();
    let mut start = 0;
    let views = shapes.iter().map(|dims| {
        let shape = Shape::from(*dims);
        let view = View {
            tensor: 0,
            start,
            shape,
        };
        start += dims.iter().product::<usize>();
        view
    });
    let views = views.collect();
    equal(["the tensor", "the shapes"], "elements", elements, start)?;
    let parts = take(vec![flat.into_dispatch()], views).into_iter();
    Ok(parts.map(Tensor::from_dispatch).collect())
}

/// Gives flat tensors other shapes.
///
/// # Errors
/// [`Size`](AttentionError::Size) for a shape of another number of elements than its tensor.
///
/// # Example
/// ```
/// use burn::tensor::{Device, Tensor};
///
/// let x = Tensor::<1>::from_floats([1.0, 2.0], &Device::flex());
/// let [x] = &burn_attention::reshaped(vec![x], vec![[2, 1].into()])?[..] else { panic!("one") };
/// assert_eq!(Tensor::<2>::from_dispatch(x.clone()).dims(), [2, 1]);
/// # Ok::<(), burn_attention::AttentionError>(())
/// ```
pub fn reshaped(tensors: Vec<Tensor<1>>, shapes: Vec<Shape>) -> Result<Vec<DispatchTensor>> {
    equal(
        ["the tensors", "the shapes"],
        "count",
        tensors.len(),
        shapes.len(),
    )?;
    for (tensor, shape) in tensors.iter().zip(&shapes) {
        let (found, expected) = (tensor.dims()[0], shape.num_elements());
        equal(["the tensor", "the shape"], "elements", found, expected)?;
    }
    let view = |(tensor, shape)| View {
        tensor,
        start: 0,
        shape,
    };
    let views = shapes.into_iter().enumerate().map(view).collect();
    let tensors = tensors.into_iter().map(Tensor::into_dispatch).collect();
    Ok(take(tensors, views))
}

fn take(tensors: Vec<DispatchTensor>, views: Vec<View>) -> Vec<DispatchTensor> {
    // One view is a message in either way, and one without elements is left to burn.
    #[cfg(feature = "remote")]
    if views.len() > 1
        && views.iter().all(|view| view.shape.num_elements() > 0)
        && tensors.iter().all(wire::is_served)
    {
        return wire::take(tensors, &views);
    }
    let parts = views.into_iter().map(|view| {
        let x = tensors[view.tensor].clone();
        part::<Dispatch>(x, view)
    });
    parts.collect()
}

/// A view by ordinary operations.
fn part<B: Backend>(x: FloatTensor<B>, view: View) -> FloatTensor<B> {
    let (all, len) = (x.shape().num_elements(), view.shape.num_elements());
    if len == all {
        return B::float_reshape(x, view.shape);
    }
    let flat = B::float_reshape(x, [all].into());
    let range = view.start..view.start + len;
    B::float_reshape(B::float_slice(flat, &[Slice::from(range)]), view.shape)
}

#[cfg(feature = "remote")]
pub(crate) mod wire {
    use burn::backend::{BackendTensor, DispatchDevice, DispatchKindConversion, Remote};
    use burn_fused::{Reader, WireOp, Writer, send_all};

    use super::*;

    const TAKE: &str = "views.take";
    /// More than the dimensions of any tensor.
    const MOST_DIMS: usize = 16;

    #[derive(Debug, PartialEq)]
    struct Views(Vec<View>);

    impl WireOp for Views {
        const VERSION: u64 = 1;
        type Error = AttentionError;

        fn write(&self, numbers: &mut Writer) {
            numbers.size(self.0.len());
            for view in &self.0 {
                numbers.size(view.tensor);
                numbers.size(view.start);
                numbers.size(view.shape.num_dims());
                for dim in view.shape.iter() {
                    numbers.size(*dim);
                }
            }
        }

        fn read(numbers: &mut Reader<'_>) -> Result<Self> {
            let sizes: Vec<usize> = numbers.shapes().iter().map(Shape::num_elements).collect();
            let last = sizes.len().saturating_sub(1);
            let mut views = Vec::new();
            for _ in 0..numbers.size("the number of views", usize::MAX)? {
                let tensor = numbers.size("the tensor of a view", last)?;
                let all = sizes.get(tensor).copied().unwrap_or(0);
                let start = numbers.size("the start of a view", all)?;
                let mut left = all - start;
                let mut dims = Vec::new();
                for _ in 0..numbers.size("the dimensions of a view", MOST_DIMS)? {
                    let dim = numbers.size("a dimension of a view", left)?;
                    left = left.checked_div(dim).unwrap_or(0);
                    dims.push(dim);
                }
                let shape = Shape::from(dims);
                views.push(View {
                    tensor,
                    start,
                    shape,
                });
            }
            Ok(Self(views))
        }
    }

    /// True for a float tensor of a server without a graph.
    pub(super) fn is_served(x: &DispatchTensor) -> bool {
        matches!(x.device(), DispatchDevice::Remote(_)) && x.dtype().is_float()
    }

    /// The views of served tensors by one operation. Tensors that nothing else holds end with it.
    pub(super) fn take(tensors: Vec<DispatchTensor>, views: &[View]) -> Vec<DispatchTensor> {
        let tensors = tensors.into_iter().map(|x| {
            let served = DispatchTensor::try_into_backend(x).expect("a served tensor");
            BackendTensor::<Remote>::float(served)
        });
        let tensors: Vec<_> = tensors.collect();
        let types: Vec<_> = tensors.iter().map(TensorMetadata::dtype).collect();
        let outputs = views
            .iter()
            .map(|view| (view.shape.clone(), types[view.tensor]));
        let outputs = outputs.collect();
        let parts = send_all(TAKE, &Views(views.to_vec()), tensors, outputs).into_iter();
        let parts = parts.map(|x| DispatchTensor::from_backend(BackendTensor::<Remote>::Float(x)));
        parts.collect()
    }

    #[cfg(feature = "remote-server")]
    mod server {
        use burn::backend::ir::BackendIr;
        use burn_fused::handle;
        use burn_remote::server::CustomOpRegistry;

        use super::*;

        /// Lets a server take views by its backend.
        pub(crate) fn register<B: BackendIr>(operations: &mut CustomOpRegistry<B>) {
            handle(
                operations,
                TAKE,
                |_: &Views, _: &Vec<_>| Ok(()),
                |Views(views), tensors: Vec<_>| {
                    let parts = views.into_iter();
                    let parts = parts.map(|view| part::<B>(tensors[view.tensor].clone(), view));
                    parts.collect::<Vec<_>>()
                },
            );
        }
    }

    #[cfg(feature = "remote-server")]
    pub(crate) use server::register;

    #[cfg(test)]
    mod tests {
        use burn_fused::{decode, encode};

        use super::*;

        #[test]
        fn views_come_back_and_those_beyond_their_tensor_are_refused() {
            let view = |tensor, start, dims: &[usize]| {
                let shape = Shape::from(dims.to_vec());
                Views(vec![View {
                    tensor,
                    start,
                    shape,
                }])
            };
            let shapes = [Shape::new([2, 3]), Shape::new([5])];
            for views in [
                view(0, 0, &[6]),
                view(1, 3, &[2, 1]),
                view(1, 5, &[0]),
                view(0, 2, &[2, 2]),
            ] {
                assert_eq!(decode::<Views>(&encode(&views), &shapes), Ok(views));
            }
            for views in [
                view(2, 0, &[1]),
                view(1, 6, &[0]),
                view(0, 3, &[2, 2]),
                view(0, 0, &[usize::MAX, 2]),
                view(1, 0, &[1; 17]),
            ] {
                assert!(
                    decode::<Views>(&encode(&views), &shapes).is_err(),
                    "{views:?}"
                );
            }
        }
    }
}
