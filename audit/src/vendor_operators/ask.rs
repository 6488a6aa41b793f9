//! Asks both sides for a verdict on calls, in a process of its own: a call can end it.
#![allow(
    unsafe_code,
    reason = "the vendor's library and the simulator are called by their C interface"
)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{env, fs};

use ascend_sim::{Machine, Session};
use half::{bf16, f16};
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use rope_ascend::sys::aclDataType;
use serde::{Deserialize, Serialize};

use super::build::first_phase;
use super::call::{Argument, Call, Tensor};
use super::{Result, Soc, VendorError, cannot_access};

/// The hidden word of the command line for [`answer`].
pub(crate) const WORD: &str = "vendor-operators-ask";
/// Memory that no call reads: first phases only compare addresses.
const FIRST_ADDRESS: usize = 0x1000_0000;
const ADDRESS_STEP: usize = 0x10_0000;
/// A first phase takes microseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a side's code is where the call ended the process.
pub(super) const DIED: i32 = -1;
/// What a side's code is where an argument could not be made.
pub(super) const NO_ARGUMENT: i32 = -2;

/// What one side says to a call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Verdict {
    /// 0 where it accepts.
    pub(super) code: i32,
    pub(super) message: String,
}

/// What both sides say, and the kernels that the vendor's would launch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) vendor: Verdict,
    pub(super) simulator: Verdict,
    /// Such as `Add:AI Core`.
    pub(super) kernels: Vec<String>,
    /// Functions that the verdict passed through and that the harness fills.
    pub(super) filled: Vec<String>,
}

/// Asks for each of `calls`, in order.
pub(super) fn ask(library: &Path, soc: Soc, calls: &[Call], work: &Path) -> Result<Vec<Answer>> {
    let program = env::current_exe().map_err(cannot_access(Path::new("this program")))?;
    let lines: Vec<String> = calls.iter().map(Call::to_string).collect();
    let file = work.join(format!("calls-{}", soc.name()));
    fs::write(&file, lines.join("\n")).map_err(cannot_access(&file))?;
    let mut answers: Vec<Answer> = Vec::with_capacity(calls.len());
    while answers.len() < calls.len() {
        let mut command = Command::new(&program);
        command
            .arg(WORD)
            .arg(library)
            .arg(&file)
            .arg(answers.len().to_string());
        command.env("VENDOR_OPERATORS_SOC", soc.name());
        let output = command.output().map_err(cannot_access(&program))?;
        let text = String::from_utf8_lossy(&output.stdout);
        // The last line may be cut off.
        let parsed = text
            .lines()
            .map_while(|line| serde_json::from_str(line).ok());
        answers.extend(parsed);
        if answers.len() < calls.len() {
            if output.status.success() {
                return Err(VendorError::Failed("a call was not answered".to_owned()));
            }
            let errors = String::from_utf8_lossy(&output.stderr);
            if let Some(error) = errors.lines().find(|line| line.starts_with("error: ")) {
                return Err(VendorError::Failed(error.to_owned()));
            }
            let message = format!("the process ended: {}", output.status);
            answers.push(Answer {
                vendor: Verdict {
                    code: DIED,
                    message,
                },
                ..Answer::default()
            });
        }
    }
    Ok(answers)
}

/// Prints the answers to the calls of a file, one line each. `words` are the library, the file, and
/// the index of the first call.
pub(crate) fn answer(words: &[&str]) -> Result<String> {
    let [library, file, first] = words else {
        return Err(VendorError::Failed(
            "a library, a file and an index are expected".to_owned(),
        ));
    };
    let text = fs::read_to_string(file).map_err(cannot_access(Path::new(file)))?;
    let first = first.parse().unwrap_or(0);
    let vendor = Vendor::open(Path::new(library))?;
    let simulator = Simulator::start()?;
    let answered = Arc::new(AtomicUsize::new(0));
    end_when_stuck(Arc::clone(&answered));
    for line in text.lines().skip(first) {
        let call = Call::parse(line).map_err(|error| VendorError::Failed(error.to_string()))?;
        let mut answer = vendor.ask(&call)?;
        answer.simulator = simulator.ask(&call, &vendor)?;
        let line = serde_json::to_string(&answer);
        println!(
            "{}",
            line.map_err(|error| VendorError::Failed(error.to_string()))?
        );
        answered.fetch_add(1, Ordering::Relaxed);
    }
    Ok(String::new())
}

/// Ends the process when a call takes longer than [`PATIENCE`]: some never return.
fn end_when_stuck(answered: Arc<AtomicUsize>) {
    std::thread::spawn(move || {
        let mut before = usize::MAX;
        loop {
            let now = answered.load(Ordering::Relaxed);
            if now == before {
                std::process::abort();
            }
            before = now;
            std::thread::sleep(PATIENCE);
        }
    });
}

type CallPlan = unsafe extern "C" fn(*const c_void, *const u64, *mut u64, *mut *mut c_void) -> i32;
type CreateTensor = unsafe extern "C" fn(
    *const i64,
    u64,
    i32,
    *const i64,
    i64,
    i32,
    *const i64,
    u64,
    *mut c_void,
) -> *mut c_void;
type CreateList = unsafe extern "C" fn(*const *mut c_void, u64) -> *mut c_void;
type CreateScalar = unsafe extern "C" fn(*const c_void, i32) -> *mut c_void;
type CreateInts = unsafe extern "C" fn(*const i64, u64) -> *mut c_void;
type Destroy = unsafe extern "C" fn(*mut c_void) -> i32;
type GetText = unsafe extern "C" fn() -> *const c_char;

const FORMAT_ND: i32 = 2;

/// The functions that make arguments, of one side.
struct Descriptors {
    tensor: CreateTensor,
    list: CreateList,
    scalar: CreateScalar,
    ints: CreateInts,
    destroy_tensor: Destroy,
    destroy_list: Destroy,
    destroy_scalar: Destroy,
    destroy_ints: Destroy,
}

/// The arguments of one call, and what frees them.
#[derive(Default)]
struct Made {
    slots: Vec<u64>,
    objects: Vec<(Destroy, *mut c_void)>,
    texts: Vec<CString>,
    tensors: usize,
}

impl Descriptors {
    /// # Safety
    /// - `resolve` gives the addresses of the vendor's functions of these names, or of functions
    ///   declared alike, which stay mapped.
    unsafe fn load(resolve: &mut dyn FnMut(&CStr) -> Result<*const c_void>) -> Result<Self> {
        // SAFETY: of each, that the address is that of the function of the name, declared with this
        // type in the vendor's acl_meta.h; by the function's own condition.
        unsafe {
            Ok(Self {
                tensor: function(resolve(c"aclCreateTensor")?),
                list: function(resolve(c"aclCreateTensorList")?),
                scalar: function(resolve(c"aclCreateScalar")?),
                ints: function(resolve(c"aclCreateIntArray")?),
                destroy_tensor: function(resolve(c"aclDestroyTensor")?),
                destroy_list: function(resolve(c"aclDestroyTensorList")?),
                destroy_scalar: function(resolve(c"aclDestroyScalar")?),
                destroy_ints: function(resolve(c"aclDestroyIntArray")?),
            })
        }
    }

    /// The arguments, or none where the side does not make one of them.
    fn make(&self, call: &Call) -> Option<Made> {
        let mut made = Made::default();
        for argument in &call.arguments {
            let slot = match argument {
                Argument::Null => 0,
                Argument::Integer(value) => *value as u64,
                Argument::Real(value) => real_bits(call, made.slots.len(), *value),
                Argument::DType(dtype) => u64::from(dtype.0.cast_unsigned()),
                Argument::Text(text) => {
                    made.texts.push(CString::new(text.as_str()).ok()?);
                    made.texts.last()?.as_ptr() as u64
                }
                Argument::Tensor(tensor) => {
                    let object = self.tensor(tensor, made.tensors);
                    made.tensors += 1;
                    made.keep(self.destroy_tensor, object)?
                }
                Argument::Tensors(tensors) => {
                    let first = made.tensors;
                    made.tensors += tensors.len();
                    let members = tensors.iter().zip(first..);
                    let members: Vec<_> = members.map(|(each, at)| self.tensor(each, at)).collect();
                    if members.contains(&std::ptr::null_mut()) {
                        return None;
                    }
                    // SAFETY: as many tensors of this side as are said; the list owns them.
                    let list = unsafe { (self.list)(members.as_ptr(), members.len() as u64) };
                    made.keep(self.destroy_list, list)?
                }
                Argument::Scalar(dtype, value) => {
                    let bytes = scalar_bytes(*dtype, value)?;
                    // SAFETY: eight bytes, of which the type takes no more; they are copied.
                    let scalar = unsafe { (self.scalar)(bytes.as_ptr().cast(), dtype.0) };
                    made.keep(self.destroy_scalar, scalar)?
                }
                Argument::Ints(values) => {
                    // SAFETY: as many integers as are said, which are copied.
                    let ints = unsafe { (self.ints)(values.as_ptr(), values.len() as u64) };
                    made.keep(self.destroy_ints, ints)?
                }
            };
            made.slots.push(slot);
        }
        Some(made)
    }

    fn tensor(&self, tensor: &Tensor, at: usize) -> *mut c_void {
        let strides = tensor.strides.clone().unwrap_or_else(|| tensor.dense());
        let axes = tensor.dims.iter().zip(&strides);
        let reach: i64 = axes.map(|(dim, stride)| (dim - 1).max(0) * stride).sum();
        // A dense tensor is the whole of its memory.
        let is_whole = tensor.strides.is_none() && tensor.offset == 0;
        let flat = [reach + tensor.offset + 1];
        let storage: &[i64] = if is_whole { &tensor.dims } else { &flat };
        let address = (FIRST_ADDRESS + at * ADDRESS_STEP) as *mut c_void;
        // SAFETY: dims and strides are as many as the rank says, the storage as its own count, and
        // all are copied; the address is only compared, as nothing runs the call.
        unsafe {
            (self.tensor)(
                tensor.dims.as_ptr(),
                tensor.dims.len() as u64,
                tensor.dtype.0,
                strides.as_ptr(),
                tensor.offset,
                FORMAT_ND,
                storage.as_ptr(),
                storage.len() as u64,
                address,
            )
        }
    }
}

impl Made {
    fn keep(&mut self, destroy: Destroy, object: *mut c_void) -> Option<u64> {
        self.objects.push((destroy, object));
        (!object.is_null()).then_some(object as u64)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for (destroy, object) in self.objects.drain(..) {
            // SAFETY: made by the same side, and freed once, here; null is accepted.
            unsafe { destroy(object) };
        }
    }
}

fn real_bits(call: &Call, at: usize, value: f64) -> u64 {
    match call.operator.parameters[at].1 {
        "f32" => u64::from((value as f32).to_bits()),
        _ => value.to_bits(),
    }
}

/// A scalar in memory; none where the text is no value of the type.
fn scalar_bytes(dtype: aclDataType, text: &str) -> Option<[u8; 8]> {
    let mut bytes = [0; 8];
    let mut put = |value: &[u8]| bytes[..value.len()].copy_from_slice(value);
    let real = || text.parse::<f64>().ok();
    match dtype {
        aclDataType::FLOAT => put(&text.parse::<f32>().ok()?.to_le_bytes()),
        aclDataType::FLOAT16 => put(&f16::from_f64(real()?).to_le_bytes()),
        aclDataType::BF16 => put(&bf16::from_f64(real()?).to_le_bytes()),
        aclDataType::DOUBLE => put(&real()?.to_le_bytes()),
        // The low bytes of the number: eight are read of none but the widest.
        _ => put(&(text.parse::<i128>().ok()? as i64).to_le_bytes()),
    }
    Some(bytes)
}

/// # Safety
/// - The address is that of a function of the type `T`.
unsafe fn function<T: Copy>(address: *const c_void) -> T {
    const { assert!(size_of::<T>() == size_of::<*const c_void>()) };
    // SAFETY: of the same size (asserted), and of this type by the function's own condition.
    unsafe { std::mem::transmute_copy(&address) }
}

/// The text at a C string, empty for null.
///
/// # Safety
/// - `text` is null or a C string.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a C string by the function's own condition.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// The vendor's library.
struct Vendor {
    library: Library,
    descriptors: Descriptors,
    log: GetText,
    launches: GetText,
    filled: GetText,
    reset: unsafe extern "C" fn(),
}

impl Vendor {
    fn open(path: &Path) -> Result<Self> {
        let failed = |error: libloading::Error| VendorError::Failed(error.to_string());
        // SAFETY: built by this program from the vendor's host code, whose initialisers register
        // operators only.
        let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) };
        let library = library.map_err(failed)?;
        // SAFETY: the address alone; the type is the caller's to know.
        let mut resolve = |name: &CStr| unsafe {
            let symbol = library.get::<*const c_void>(name.to_bytes_with_nul());
            Ok(symbol.map_err(failed)?.as_raw_ptr().cast_const())
        };
        // SAFETY: the functions of the vendor's library by their names, and the harness's own,
        // which have these types; the library stays open as long as they are used.
        unsafe {
            Ok(Self {
                descriptors: Descriptors::load(&mut resolve)?,
                log: function(resolve(c"harness_log")?),
                launches: function(resolve(c"harness_launches")?),
                filled: function(resolve(c"harness_undefined")?),
                reset: function(resolve(c"harness_reset")?),
                library,
            })
        }
    }

    fn symbol(&self, name: &str) -> Result<*const c_void> {
        // SAFETY: the address alone; the type is the caller's to know.
        let symbol = unsafe { self.library.get::<*const c_void>(name.as_bytes()) };
        let symbol = symbol.map_err(|error| VendorError::Failed(error.to_string()))?;
        Ok(symbol.as_raw_ptr().cast_const())
    }

    /// The harness's function that calls a first phase with slots.
    fn caller(&self, call: &Call) -> Result<CallPlan> {
        let address = self.symbol(&format!("harness_call_{}", call.operator.function))?;
        // SAFETY: generated with this type for each operator of the table.
        Ok(unsafe { function(address) })
    }

    fn ask(&self, call: &Call) -> Result<Answer> {
        // SAFETY: it clears the harness's notes.
        unsafe { (self.reset)() };
        let mut answer = Answer::default();
        let Some(made) = self.descriptors.make(call) else {
            answer.vendor.code = NO_ARGUMENT;
            return Ok(answer);
        };
        let plan = self.symbol(&first_phase(call.operator.function))?;
        answer.vendor.code = ask_plan(self.caller(call)?, plan, &made);
        let read = |get: GetText| {
            // SAFETY: a C string that stays until the next call.
            unsafe { text_at(get()) }
        };
        let list = |get: GetText| -> Vec<String> {
            let text = read(get);
            let entries = text.split(',').filter(|entry| !entry.is_empty());
            entries.map(str::to_owned).collect()
        };
        if answer.vendor.code != 0 {
            answer.vendor.message = read(self.log).lines().next().unwrap_or_default().to_owned();
        }
        answer.kernels = list(self.launches);
        answer.filled = list(self.filled);
        Ok(answer)
    }
}

/// Plans a call; the executor is left to the side that made it.
fn ask_plan(caller: CallPlan, plan: *const c_void, made: &Made) -> i32 {
    let (mut workspace, mut executor) = (0u64, std::ptr::null_mut());
    // SAFETY: the caller passes as many slots as the first phase at `plan` has parameters, of the
    // types that the operator table declares; the objects live until after the call.
    unsafe {
        caller(
            plan,
            made.slots.as_ptr(),
            &raw mut workspace,
            &raw mut executor,
        )
    }
}

/// The simulator, with a device that is current.
struct Simulator {
    descriptors: Descriptors,
    message: GetText,
    _session: Session,
}

impl Simulator {
    fn start() -> Result<Self> {
        let session = Session::with_machine(Machine::ascend_910b());
        // SAFETY: the simulator declares its functions as the vendor does (compared by
        // `cargo xtask abi`), and is linked into this program.
        let simulator = unsafe {
            Self {
                descriptors: Descriptors::load(&mut symbol)?,
                message: function(symbol(c"aclGetRecentErrMsg")?),
                _session: session,
            }
        };
        // SAFETY: as above; a null configuration is allowed.
        let code = unsafe {
            let init: unsafe extern "C" fn(*const c_char) -> i32 = function(symbol(c"aclInit")?);
            let set: unsafe extern "C" fn(i32) -> i32 = function(symbol(c"aclrtSetDevice")?);
            init(std::ptr::null()) | set(0)
        };
        match code {
            0 => Ok(simulator),
            code => Err(VendorError::Failed(format!(
                "the simulator starts with {code}"
            ))),
        }
    }

    fn ask(&self, call: &Call, vendor: &Vendor) -> Result<Verdict> {
        let mut verdict = Verdict {
            code: NO_ARGUMENT,
            message: String::new(),
        };
        if let Some(made) = self.descriptors.make(call) {
            let name = CString::new(first_phase(call.operator.function));
            let name = name.map_err(|error| VendorError::Failed(error.to_string()))?;
            verdict.code = ask_plan(vendor.caller(call)?, symbol(&name)?, &made);
        }
        if verdict.code != 0 {
            // SAFETY: a C string that stays until the next call of this thread.
            verdict.message = unsafe { text_at((self.message)()) };
        }
        Ok(verdict)
    }
}

/// A function of the simulator.
fn symbol(name: &CStr) -> Result<*const c_void> {
    let address = ascend_sim::symbol(name);
    if address.is_null() {
        let name = name.to_string_lossy();
        return Err(VendorError::Failed(format!("the simulator has no {name}")));
    }
    Ok(address)
}
