//! Cases and the runner.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use burn::backend::flex::{Flex, FlexDevice};
use burn::backend::tensor::{BoolTensor, Device, FloatTensor, IntTensor};
use burn::backend::{Backend, DType, FloatDType, IntDType, TensorData};

use super::compare::{Tolerance, compare};
use super::input::{Input, Random, Range, Value, View};

/// The tensors of a running case, taken in the order of its inputs.
pub(crate) struct Args<B: Backend> {
    values: std::vec::IntoIter<Value<B>>,
    pub(crate) device: Device<B>,
}

impl<B: Backend> Args<B> {
    pub(crate) fn new(values: Vec<Value<B>>, device: Device<B>) -> Self {
        Self {
            values: values.into_iter(),
            device,
        }
    }

    /// The next input.
    pub(crate) fn v(&mut self) -> Value<B> {
        self.values.next().expect("another input of the case")
    }

    /// The next input, a float tensor.
    pub(crate) fn f(&mut self) -> FloatTensor<B> {
        match self.values.next() {
            Some(Value::Float(x)) => x,
            other => panic!("the case's next input is {other:?}, not a float"),
        }
    }

    /// The next input, an int tensor.
    pub(crate) fn i(&mut self) -> IntTensor<B> {
        match self.values.next() {
            Some(Value::Int(x)) => x,
            other => panic!("the case's next input is {other:?}, not an int"),
        }
    }

    /// The next input, a bool tensor.
    pub(crate) fn b(&mut self) -> BoolTensor<B> {
        match self.values.next() {
            Some(Value::Bool(x)) => x,
            other => panic!("the case's next input is {other:?}, not a bool"),
        }
    }
}

type Run<B> = Box<dyn Fn(&mut Args<B>) -> Vec<Value<B>>>;

/// One call of one method on given inputs.
pub(crate) struct Case<B: Backend> {
    op: &'static str,
    note: String,
    inputs: Vec<Input>,
    tolerance: Tolerance,
    run: Run<B>,
}

/// The kind of a suite's elements.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

/// The cases of one group of methods, for one backend and one element type.
pub(crate) struct Suite<B: Backend> {
    /// Element type of float or int inputs.
    pub(crate) dtype: DType,
    cases: Vec<Case<B>>,
    random: Random,
}

/// Adds a case: `op!(suite, tolerance, [inputs], "what is special", |a| Kind::method(arguments))`.
///
/// The name under which the case is counted is the name of the method that it calls.
macro_rules! op {
    ($suite:expr, $tolerance:expr, $inputs:expr, $note:expr, |$a:ident| { $($call:tt)* }) => {
        op!($suite, $tolerance, $inputs, $note, |$a| $($call)*)
    };
    ($suite:expr, $tolerance:expr, $inputs:expr, $note:expr,
     |$a:ident| $kind:ident::$op:ident($($arg:expr),* $(,)?)) => {{
        let inputs = Vec::from($inputs);
        $suite.push(stringify!($op), $note, inputs, $tolerance, move |$a| {
            vec![$crate::support::input::Value::$kind(B::$op($($arg),*))]
        })
    }};
    ($suite:expr, $tolerance:expr, $inputs:expr, |$a:ident| $($call:tt)*) => {
        op!($suite, $tolerance, $inputs, "", |$a| $($call)*)
    };
}
pub(crate) use op;

impl<B: Backend> Suite<B> {
    pub(crate) fn new(dtype: DType) -> Self {
        Self {
            dtype,
            cases: Vec::new(),
            random: Random(1),
        }
    }

    pub(crate) fn push(
        &mut self,
        op: &'static str,
        note: impl Into<String>,
        inputs: Vec<Input>,
        tolerance: Tolerance,
        run: impl Fn(&mut Args<B>) -> Vec<Value<B>> + 'static,
    ) {
        self.cases.push(Case {
            op,
            note: note.into(),
            inputs,
            tolerance,
            run: Box::new(run),
        });
    }

    /// An input of the suite's element type.
    pub(crate) fn input(&mut self, shape: &[usize], view: View, range: &Range) -> Input {
        Input::new(shape, view, self.dtype, range, &mut self.random)
    }

    /// An input of the given element type.
    pub(crate) fn typed(
        &mut self,
        shape: &[usize],
        view: View,
        dtype: DType,
        range: &Range,
    ) -> Input {
        Input::new(shape, view, dtype, range, &mut self.random)
    }

    /// A contiguous input of the suite's element type.
    pub(crate) fn plain(&mut self, shape: &[usize], range: &Range) -> Input {
        self.input(shape, View::Contiguous, range)
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.dtype {
            dtype if dtype.is_float() => Kind::Float,
            dtype if dtype.is_bool() => Kind::Bool,
            _ => Kind::Int,
        }
    }

    pub(crate) fn float_dtype(&self) -> FloatDType {
        self.dtype.into()
    }

    pub(crate) fn int_dtype(&self) -> IntDType {
        self.dtype.into()
    }

    /// The methods that have a case.
    pub(crate) fn ops(&self) -> impl Iterator<Item = &'static str> {
        self.cases.iter().map(|case| case.op)
    }
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// A panic's message instead of the panic, and nothing on the terminal: one run reports all
/// failures.
pub(crate) fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                usual(info);
            }
        }));
    });
    QUIET.set(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(false);
    result.map_err(|payload| {
        let message = payload.downcast_ref::<String>().cloned().or_else(|| {
            payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
        });
        format!(
            "panicked: {}",
            message.unwrap_or_else(|| "no message".into())
        )
    })
}

fn read<B: Backend>(values: Vec<Value<B>>) -> Result<Vec<TensorData>, String> {
    values
        .into_iter()
        .map(|value| {
            value
                .read()
                .map_err(|error| format!("read failed: {error:?}"))
        })
        .collect()
}

impl<B: Backend> Case<B> {
    fn call(&self, values: Vec<Value<B>>, device: &Device<B>) -> Result<Vec<TensorData>, String> {
        let mut args = Args::new(values, device.clone());
        caught(|| read((self.run)(&mut args)))?
    }

    /// The reference: every input contiguous, so that no view of the reference's own is trusted.
    fn reference(&self, device: &Device<B>) -> Result<Vec<TensorData>, String> {
        self.call(
            self.inputs
                .iter()
                .map(|input| Value::upload(input.data(), device))
                .collect(),
            device,
        )
    }

    /// The op on handles that nobody else holds, so that it may work in place.
    fn unique(&self, device: &Device<B>) -> Result<Vec<TensorData>, String> {
        let values = caught(|| {
            self.inputs
                .iter()
                .map(|input| input.upload(device).1)
                .collect()
        })?;
        self.call(values, device)
    }

    /// The op on shared handles; fails if a handle that was kept, or the buffer under a view, shows
    /// a change.
    fn shared(&self, device: &Device<B>) -> Result<Vec<TensorData>, String> {
        let (buffers, views): (Vec<_>, Vec<_>) = caught(|| {
            self.inputs
                .iter()
                .map(|input| input.upload::<B>(device))
                .unzip()
        })?;
        let before = caught(|| read(buffers.clone()))??;
        let result = self.call(views.clone(), device)?;
        let after = caught(|| read(buffers))??;
        let kept = caught(|| read(views))??;
        for (k, input) in self.inputs.iter().enumerate() {
            compare(&before[k], &after[k], Tolerance::Exact)
                .map_err(|difference| format!("the buffer of input {k} changed: {difference}"))?;
            compare(&input.data(), &kept[k], Tolerance::Exact)
                .map_err(|difference| format!("input {k} changed: {difference}"))?;
        }
        Ok(result)
    }

    fn agrees(
        &self,
        expected: &[TensorData],
        found: Result<Vec<TensorData>, String>,
    ) -> Result<(), String> {
        let found = found?;
        if expected.len() != found.len() {
            return Err(format!(
                "expected {} outputs, found {}",
                expected.len(),
                found.len()
            ));
        }
        for (k, (expected, found)) in expected.iter().zip(&found).enumerate() {
            compare(expected, found, self.tolerance).map_err(|difference| match k {
                0 => difference,
                k => format!("output {k}: {difference}"),
            })?;
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let mut text = String::from(self.op);
        if !self.note.is_empty() {
            let _ = write!(text, " [{}]", self.note);
        }
        let inputs: Vec<String> = self.inputs.iter().map(Input::to_string).collect();
        let _ = write!(text, "({})", inputs.join("; "));
        text
    }
}

/// Failures of a test, gathered before it panics.
#[derive(Default)]
pub(crate) struct Failures {
    by_op: BTreeMap<&'static str, Vec<String>>,
    checks: usize,
}

impl Failures {
    pub(crate) fn check(&mut self, op: &'static str, result: Result<(), String>) {
        self.checks += 1;
        if let Err(message) = result {
            let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
            self.by_op.entry(op).or_default().push(message);
        }
    }

    /// # Panics
    /// If anything failed, with every failing op and its first failures.
    pub(crate) fn report(self, backend: &str) {
        const SHOWN: usize = 4;
        assert!(self.checks > 0, "nothing was checked");
        if self.by_op.is_empty() {
            return;
        }
        let failed: usize = self.by_op.values().map(Vec::len).sum();
        let mut text = format!(
            "{failed} of {} checks on {backend} failed, in {} ops:\n",
            self.checks,
            self.by_op.len()
        );
        for messages in self.by_op.values() {
            for message in messages.iter().take(SHOWN) {
                let _ = writeln!(text, "  {message}");
            }
            if messages.len() > SHOWN {
                let _ = writeln!(text, "    … and {} more", messages.len() - SHOWN);
            }
        }
        panic!("{text}");
    }
}

/// For a backend with nothing to check after a test.
pub(crate) fn nothing_further() {}

/// Runs every case on Flex and on `B`, there with unique and with shared inputs, and reports all
/// that differ.
pub(crate) fn run<B: Backend>(
    device: &Device<B>,
    dtype: DType,
    reference: fn(&mut Suite<Flex>),
    tested: fn(&mut Suite<B>),
) {
    let mut flex = Suite::<Flex>::new(dtype);
    reference(&mut flex);
    let mut suite = Suite::<B>::new(dtype);
    tested(&mut suite);
    assert_eq!(flex.cases.len(), suite.cases.len());

    let mut failures = Failures::default();
    for (reference, case) in flex.cases.iter().zip(&suite.cases) {
        let expected = match reference.reference(&FlexDevice) {
            Ok(expected) => expected,
            Err(message) => {
                failures.check(
                    case.op,
                    Err(format!("{}: the reference {message}", case.describe())),
                );
                continue;
            }
        };
        let unique = case.agrees(&expected, case.unique(device));
        let shared = case.agrees(&expected, case.shared(device));
        let describe = |mode: &str, error| format!("{} {mode}: {error}", case.describe());
        if unique.is_err() && unique == shared {
            failures.check(case.op, unique.map_err(|error| describe("both", error)));
        } else {
            failures.check(case.op, unique.map_err(|error| describe("unique", error)));
            failures.check(case.op, shared.map_err(|error| describe("shared", error)));
        }
    }
    failures.report(&B::name(device));
}
