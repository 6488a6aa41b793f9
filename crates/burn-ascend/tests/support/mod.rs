//! A test suite for burn backends: every method of the backend traits, compared with Flex.
//!
//! A case is one call of one method on given inputs. The same generic function builds the cases for
//! Flex and for the backend under test, so that both run the same call; the runner compares shape,
//! type and values, with inputs that only the call holds and with inputs that are held and must not
//! change.

pub(crate) mod cases;
pub(crate) mod compare;
pub(crate) mod coverage;
pub(crate) mod devices;
pub(crate) mod gradients;
pub(crate) mod groups;
pub(crate) mod handles;
pub(crate) mod input;
pub(crate) mod random;
pub(crate) mod suite;
