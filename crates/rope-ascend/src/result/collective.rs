//! Calls of the collective library.

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

use super::recent_message;
use crate::error::{AscendError, Result};
use crate::sys::{
    AclRt, Hccl, HcclComm, HcclCommConfig, HcclCommConfigCapability, HcclConfig, HcclConfigValue,
    HcclDataType, HcclReduceOp, HcclResult, HcclRootInfo, aclrtStream,
};

/// The tables that the calls take, and the rank for their messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller<'a> {
    pub(crate) rt: &'a AclRt,
    pub(crate) hccl: &'a Hccl,
    pub(crate) rank: u32,
}

/// The settings of a communicator: its memory and the order of sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) buffer_mb: u32,
    pub(crate) deterministic: bool,
    pub(crate) timeout_s: u32,
}

/// The operands of a call: source, destination and element count of the C function.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) send: *mut c_void,
    pub(crate) receive: *mut c_void,
    pub(crate) count: u64,
    pub(crate) dtype: HcclDataType,
    pub(crate) stream: aclrtStream,
}

/// The operands of an exchange between pairs of ranks. Each list has a number for each rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exchange<'a> {
    pub(crate) buffers: [*mut c_void; 2],
    /// Elements for each rank, and from it.
    pub(crate) counts: [&'a [u64]; 2],
    /// The first of them in the buffers.
    pub(crate) displacements: [&'a [u64]; 2],
    pub(crate) dtype: HcclDataType,
    pub(crate) stream: aclrtStream,
}

impl Caller<'_> {
    /// Converts the result of `function` to a [`Result`].
    fn check(&self, function: &'static str, result: HcclResult) -> Result<()> {
        if result == HcclResult::SUCCESS {
            return Ok(());
        }
        // SAFETY: takes a number; returns null or a constant nul-terminated string.
        let text = unsafe { (self.hccl.HcclGetErrorString)(result) };
        let meaning = if text.is_null() {
            "no description known".to_owned()
        } else {
            // SAFETY: not null (checked); nul-terminated, and constant.
            let text = unsafe { CStr::from_ptr(text) };
            text.to_string_lossy().into_owned()
        };
        Err(AscendError::Collective {
            function,
            rank: self.rank,
            code: result.0,
            meaning,
            detail: recent_message(self.rt),
        })
    }

    /// The root info by which ranks find the current device, which becomes rank 0 of one
    /// communicator.
    #[doc(alias = "HcclGetRootInfo")]
    pub(crate) fn root_info(&self) -> Result<Box<HcclRootInfo>> {
        let mut root = Box::new(HcclRootInfo {
            internal: [0; size_of::<HcclRootInfo>()],
        });
        // SAFETY: a value of this function's is written during the call.
        let code = unsafe { (self.hccl.HcclGetRootInfo)(&raw mut *root) };
        self.check("HcclGetRootInfo", code)?;
        Ok(root)
    }

    /// Makes the current device a rank of a communicator and returns when all ranks have joined.
    /// Also returns true if its sums have a fixed order.
    #[doc(alias = "HcclCommInitRootInfo")]
    #[doc(alias = "HcclCommInitRootInfoConfig")]
    pub(crate) fn join(
        &self,
        ranks: u32,
        root: &HcclRootInfo,
        settings: Settings,
    ) -> Result<(HcclComm, bool)> {
        let mut comm = MaybeUninit::<HcclComm>::new(std::ptr::null_mut());
        // SAFETY: takes nothing.
        let known = |function: unsafe extern "C" fn() -> u32| unsafe { function() };
        let known = self.hccl.HcclGetCommConfigCapability.map_or(0, known);
        let knows = |part: HcclCommConfigCapability| known > part.0.cast_unsigned();
        let with_config = self.hccl.HcclCommInitRootInfoConfig;
        if let Some(join) = with_config.filter(|_| knows(HcclCommConfigCapability::DETERMINISTIC)) {
            let mut config = HcclCommConfig::new();
            config.buffer_mb = settings.buffer_mb;
            config.deterministic = settings.deterministic.into();
            if knows(HcclCommConfigCapability::EXEC_TIMEOUT) {
                config.exec_timeout_s = i32::try_from(settings.timeout_s).unwrap_or(i32::MAX);
            }
            // SAFETY: root info, configuration and result are borrowed or local for the call.
            let code = unsafe {
                let (root, config) = (&raw const *root, &raw const config);
                join(ranks, root, self.rank, config, comm.as_mut_ptr())
            };
            self.check("HcclCommInitRootInfoConfig", code)?;
            // SAFETY: initialised above, whatever the call wrote.
            return Ok((unsafe { comm.assume_init() }, settings.deterministic));
        }
        let mut is_fixed = false;
        if let Some(set) = self.hccl.HcclSetConfig.filter(|_| settings.deterministic) {
            let value = HcclConfigValue { value: 1 };
            // SAFETY: takes numbers.
            let code = unsafe { set(HcclConfig::DETERMINISTIC, value) };
            self.check("HcclSetConfig", code)?;
            is_fixed = true;
        }
        // SAFETY: root info and result are borrowed or local for the call.
        let code =
            unsafe { (self.hccl.HcclCommInitRootInfo)(ranks, root, self.rank, comm.as_mut_ptr()) };
        self.check("HcclCommInitRootInfo", code)?;
        // SAFETY: initialised above, whatever the call wrote.
        Ok((unsafe { comm.assume_init() }, is_fixed))
    }

    /// Destroys a communicator.
    ///
    /// # Safety
    /// - `comm` is a live communicator of the current device, idle, and not used afterwards.
    #[doc(alias = "HcclCommDestroy")]
    pub(crate) unsafe fn destroy(&self, comm: HcclComm) -> Result<()> {
        // SAFETY: a live handle, given up by the caller.
        let code = unsafe { (self.hccl.HcclCommDestroy)(comm) };
        self.check("HcclCommDestroy", code)
    }

    /// Queues the sum over the ranks, of `count` elements on each.
    ///
    /// # Safety
    /// - `comm` and the stream are live and of the current device.
    /// - Both ranges hold `count` elements of device memory and stay allocated until the stream has
    ///   passed the operation.
    #[doc(alias = "HcclAllReduce")]
    pub(crate) unsafe fn all_reduce(&self, comm: HcclComm, of: Transfer) -> Result<()> {
        // SAFETY: by this function's own conditions.
        let code = unsafe {
            let op = HcclReduceOp::SUM;
            let (send, receive) = (of.send, of.receive);
            (self.hccl.HcclAllReduce)(send, receive, of.count, of.dtype, op, comm, of.stream)
        };
        self.check("HcclAllReduce", code)
    }

    /// Queues the sum over the ranks, of which each receives its `count` elements.
    ///
    /// # Safety
    /// - As for [`all_reduce`](Self::all_reduce); `send` has `count` elements for each rank.
    #[doc(alias = "HcclReduceScatter")]
    pub(crate) unsafe fn reduce_scatter(&self, comm: HcclComm, of: Transfer) -> Result<()> {
        // SAFETY: by this function's own conditions.
        let code = unsafe {
            let op = HcclReduceOp::SUM;
            let (send, receive) = (of.send, of.receive);
            (self.hccl.HcclReduceScatter)(send, receive, of.count, of.dtype, op, comm, of.stream)
        };
        self.check("HcclReduceScatter", code)
    }

    /// Queues the exchange of `count` elements of each rank, which all receive in rank order.
    ///
    /// # Safety
    /// - As for [`all_reduce`](Self::all_reduce); `receive` has `count` elements for each rank.
    #[doc(alias = "HcclAllGather")]
    pub(crate) unsafe fn all_gather(&self, comm: HcclComm, of: Transfer) -> Result<()> {
        // SAFETY: by this function's own conditions.
        let code = unsafe {
            let (send, receive) = (of.send, of.receive);
            (self.hccl.HcclAllGather)(send, receive, of.count, of.dtype, comm, of.stream)
        };
        self.check("HcclAllGather", code)
    }

    /// Queues the exchange of elements between all pairs of ranks. The lists are read during the
    /// call.
    ///
    /// # Safety
    /// - `comm` and the stream are live and of the current device.
    /// - Each list has a number for each rank of `comm`.
    /// - The elements that the lists name lie in device memory that stays allocated until the stream
    ///   has passed the operation; a buffer without elements may be null.
    #[doc(alias = "HcclAlltoAllV")]
    pub(crate) unsafe fn all_to_all(&self, comm: HcclComm, of: Exchange<'_>) -> Result<()> {
        let [send, receive] = of.buffers;
        let [sent, received] = of.counts.map(|list| list.as_ptr().cast());
        let [send_at, receive_at] = of.displacements.map(|list| list.as_ptr().cast());
        // SAFETY: by this function's own conditions.
        let code = unsafe {
            let (dtype, stream) = (of.dtype, of.stream);
            (self.hccl.HcclAlltoAllV)(
                send, sent, send_at, dtype, receive, received, receive_at, dtype, comm, stream,
            )
        };
        self.check("HcclAlltoAllV", code)
    }
}
