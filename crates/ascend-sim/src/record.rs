//! Lines in files for comparing runs: one for each launch, one for each call of an operator.

use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher};
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::LazyLock;

use crate::aclnn::descriptor::Scalar;
use crate::aclnn::element::dense_strides;
use crate::aclnn::{DataType, Tensor};
use crate::state::sim;

/// A variable of the environment that names a file, to which lines are added.
struct Recording {
    variable: &'static str,
    file: Option<PathBuf>,
}

static LAUNCHES: LazyLock<Recording> = LazyLock::new(|| Recording::new("ASCEND_SIM_LAUNCHES"));
static OPERATORS: LazyLock<Recording> = LazyLock::new(|| Recording::new("ASCEND_SIM_OPERATORS"));

impl Recording {
    fn new(variable: &'static str) -> Self {
        let file = std::env::var_os(variable).map(Into::into);
        Self { variable, file }
    }

    fn add(&self, mut line: String) {
        let Some(path) = &self.file else { return };
        line.push('\n');
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(path);
        if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
            eprintln!("{} is {}: {error}", self.variable, path.display());
        }
    }
}

/// True if launches are recorded.
pub(crate) fn is_on() -> bool {
    LAUNCHES.file.is_some()
}

/// Adds a line: `what`, then length and hash of each range of memory that the launch wrote.
pub(crate) fn add<'a>(what: &str, written: impl Iterator<Item = &'a [u8]>) {
    let mut line = what.to_owned();
    for bytes in written {
        // The same in every process, as its keys are fixed.
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        // Writing to a string does not fail.
        let _ = write!(line, " {}:{:016x}", bytes.len(), hasher.finish());
    }
    LAUNCHES.add(line);
}

/// Adds a line for the first phase of an operator: its code, its name, its arguments.
pub(crate) fn operator(name: &str, code: i32, arguments: impl FnOnce() -> Vec<String>) {
    if OPERATORS.file.is_some() {
        OPERATORS.add(format!("{code} {name} {}", arguments().join(" ")));
    }
}

/// The text for a handle that is null or that no object has.
const NULL: &str = "null";

fn list<T: ToString>(values: &[T], separator: &str) -> String {
    let values: Vec<String> = values.iter().map(T::to_string).collect();
    values.join(separator)
}

fn type_name(dtype: DataType) -> String {
    match dtype {
        DataType::Float => "f32".to_owned(),
        DataType::Double => "f64".to_owned(),
        // Such as f16 of Float16.
        other => {
            let name = format!("{other:?}").to_lowercase();
            name.replace("float", "f")
                .replace("uint", "u")
                .replace("int", "i")
        }
    }
}

/// A view, such as `f32[2,3]/[1,2]+4`: strides unless it is dense, offset unless it is 0.
fn view(tensor: &Tensor) -> String {
    let mut text = format!("{}[{}]", type_name(tensor.dtype), list(&tensor.dims, ","));
    if tensor.strides != dense_strides(&tensor.dims) {
        text += &format!("/[{}]", list(&tensor.strides, ","));
    }
    if tensor.offset != 0 {
        text += &format!("+{}", tensor.offset);
    }
    text
}

/// A tensor by its handle.
pub(crate) fn tensor(handle: u64) -> String {
    let state = sim();
    let found = state.descriptors.tensors.get(handle);
    found.map_or_else(|_| NULL.to_owned(), |tensor| view(tensor))
}

/// A list of tensors by its handle, such as `(f32[2];f32[3])`.
pub(crate) fn tensors(handle: u64) -> String {
    let members = sim().descriptors.lists.get(handle).cloned();
    let spell = |members: Vec<u64>| {
        let members: Vec<String> = members.into_iter().map(tensor).collect();
        format!("({})", members.join(";"))
    };
    members.map_or_else(|_| NULL.to_owned(), spell)
}

/// A scalar by its handle, such as `f64:0.5`.
pub(crate) fn scalar(handle: u64) -> String {
    let state = sim();
    let found = state.descriptors.scalars.get(handle);
    let spell = |scalar: &Scalar| format!("{}:{scalar}", type_name(scalar.dtype));
    found.map_or_else(|_| NULL.to_owned(), spell)
}

/// A list of integers by its handle, such as `{0,-1}`.
pub(crate) fn ints(handle: u64) -> String {
    let state = sim();
    let found = state.descriptors.ints.get(handle);
    found.map_or_else(
        |_| NULL.to_owned(),
        |values| format!("{{{}}}", list(values, ",")),
    )
}
