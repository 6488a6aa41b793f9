//! `TransactionOps`: many tensors read at once.

use burn::backend::ops::TransactionPrimitive;
use burn::backend::{Backend, BoolStore, DType, read_sync};

use super::shapes::SAMPLES;
use crate::support::compare::Tolerance::Exact;
use crate::support::input::{FLAGS, Range, SPREAD, Value};
use crate::support::suite::Suite;

pub(crate) fn all<B: Backend>(s: &mut Suite<B>) {
    for (shape, view) in SAMPLES {
        let floats = [(); 2].map(|()| s.input(shape, *view, &SPREAD));
        let int = s.typed(shape, *view, DType::I64, &Range::Whole(-9, 9));
        let flag = s.typed(shape, *view, DType::Bool(BoolStore::Native), &FLAGS);
        let inputs = floats.into_iter().chain([int, flag]).collect();
        s.push("tr_execute", "", inputs, Exact, |a| {
            let (first, second, int, flag) = (a.f(), a.f(), a.i(), a.b());
            let reads =
                TransactionPrimitive::<B>::new(vec![first, second], vec![], vec![int], vec![flag]);
            let data = read_sync(B::tr_execute(reads)).expect("reads");
            let read = data
                .read_floats
                .into_iter()
                .chain(data.read_ints)
                .chain(data.read_bools);
            read.map(|data| Value::upload(data, &a.device)).collect()
        });
    }
}
