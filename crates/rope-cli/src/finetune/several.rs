//! Training on several devices: a rank for each, of this process and of those on other hosts.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use rope_bench::rows::bytes;
use vlm_train::{Collective, HostSums, Rank, RankGroup, Rendezvous};

use super::{Job, Trained};
use crate::device::{self, NpuRanks, Team};
use crate::stdio::{note, note_if_slow};

/// Trains on the devices that the options name.
///
/// # Errors
/// Those of the devices and of the rendezvous; that of the first rank that failed, on any host.
pub(super) fn train(job: Job) -> Result<Trained, Box<dyn Error>> {
    let args = &job.args;
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
    let team = Team::open(&args.device, &args.token)?;
    let (devices, npus) = (team.devices().to_vec(), team.npus());
    let (group, quiet) = (group(&job)?, args.quiet);
    let rank_npus = npus.clone();
    let trained = group.run(move |rank| {
        let sums = collective(rank, &devices, rank_npus.as_ref());
        let trained =
            sums.and_then(|sums| job.train(&devices[rank.local()], Some((rank, sums)), &|| None));
        trained.map_err(|error| error.to_string())
    });
    let saved = match trained {
        Ok(saved) => saved,
        Err(error) => {
            // A device may wait for a rank that is gone, and closing it would wait, too.
            std::mem::forget(team);
            return Err(error.into());
        }
    };
    if let Some(npus) = npus.filter(|_| !quiet) {
        let (traffic, is_fixed) = npus.traffic();
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
    let first = saved
        .into_iter()
        .find(|trained| !matches!(trained, Trained::Elsewhere));
    Ok(first.unwrap_or(Trained::Elsewhere))
}

/// The ranks of this process, and the way to others.
fn group(job: &Job) -> Result<RankGroup, Box<dyn Error>> {
    let args = &job.args;
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

/// How a rank sums: NPUs by their collectives, for which they join here, others through the memory
/// of the host.
fn collective(
    rank: &Rank,
    devices: &[Device],
    npus: Option<&NpuRanks>,
) -> Result<Arc<dyn Collective>, Box<dyn Error>> {
    let Some(npus) = npus else {
        return Ok(Arc::new(HostSums(rank.clone())));
    };
    let root = match rank.rank() {
        0 => npus.root_info()?,
        _ => Vec::new(),
    };
    let roots = rank.exchange(root)?;
    let first = rank.rank() - rank.local();
    // One thread joins for all NPUs of the process.
    if rank.local() == 0 {
        npus.join(first, rank.ranks(), &roots[0])?;
    }
    rank.exchange(Vec::new())?;
    Ok(npus.collective(first, rank.ranks(), devices))
}
