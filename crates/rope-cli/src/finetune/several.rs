//! Training on several devices: a rank for each, of this process and of those on other hosts.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use rope_bench::rows::bytes;
use vlm_train::job::{Job, JobEnd};
use vlm_train::{RankGroup, Rendezvous};

use super::memory::StepMeter;
use super::{FinetuneArgs, Shown};
use crate::device::{self, Devices};
use crate::stdio::{note, note_if_slow};

/// Trains on the devices that the options name.
///
/// # Errors
/// Those of the devices and of the rendezvous; that of the first rank that failed, on any host.
pub(super) fn train(args: &FinetuneArgs, job: Job) -> Result<JobEnd, Box<dyn Error>> {
    if args.hosts == 1 {
        for device in &args.device {
            args.token.expect_used(device)?;
        }
    }
    if args.hosts > 1 && !args.device.iter().all(device::Device::is_npu) {
        return Err(
            "several hosts need NPUs (--device ascend:N): the gradients of other devices \
                    are summed in the memory of one process"
                .into(),
        );
    }
    let devices = Arc::new(Devices::open(&args.device, &args.token)?);
    let group = group(args)?;
    let is_planned = args.is_planned();
    let (shown, of_ranks, plan) = (args.clone(), devices.clone(), job.plan().clone());
    let trained = job.train_ranks(devices.clone(), &group, move |rank| {
        let is_first = rank.rank() == 0;
        let mut shown = Shown::new(&shown, is_first);
        let has_plan = is_first && is_planned && of_ranks.traffic().is_some();
        shown.meter = has_plan.then(|| StepMeter::start(plan.clone(), false));
        let devices = of_ranks.clone();
        shown.memory = Box::new(move || devices.memory_bytes());
        shown
    });
    let trained = match trained {
        Ok(trained) => trained,
        Err(error) => {
            // A device may wait for a rank that is gone, and closing it would wait, too.
            std::mem::forget(devices);
            return Err(error.into());
        }
    };
    if let Some((traffic, is_fixed)) = devices.traffic().filter(|_| !args.quiet) {
        note(format_args!(
            "each NPU took part in {} collective operations on {} in all, and sent at least {}; \
             sums were {}",
            traffic.calls,
            bytes(traffic.bytes as f64),
            bytes(traffic.least_sent_bytes as f64),
            if is_fixed {
                "in a fixed order"
            } else {
                "not in a fixed order: the next run may differ in the last bits"
            },
        ));
    }
    Ok(trained)
}

/// The ranks of this process, and the way to others.
fn group(args: &FinetuneArgs) -> Result<RankGroup, Box<dyn Error>> {
    let timeout = Duration::from_secs(args.rank_timeout as u64);
    let local = args.device.len();
    let Some(address) = args.rendezvous.clone().filter(|_| args.hosts > 1) else {
        return Ok(RankGroup::of_process(local, timeout));
    };
    if args.host >= args.hosts {
        let found = args.host;
        return Err(format!("--host must be below --hosts {}, found {found}", args.hosts).into());
    }
    let waiting = (!args.quiet).then(|| {
        note_if_slow(format!(
            "waiting up to {} s for all {} hosts at {address} ...",
            args.rank_timeout, args.hosts
        ))
    });
    let rendezvous = Rendezvous {
        address,
        hosts: args.hosts,
        host: args.host,
        local,
        token: args.token.shared_token()?,
        timeout,
    };
    let group = rendezvous.meet();
    drop(waiting);
    Ok(group?)
}
