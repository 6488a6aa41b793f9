//! The options of `mrope finetune` besides those of the run: devices, printing and dry runs.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use rope_ascend::safe::CommunicatorOptions;
use vlm_train::job::{FinetuneConfig, LossChoice, RunRanks};
use vlm_train::{Sharding, TrainedParts};

use crate::arguments::{above_0, count_in};
use crate::device::{Device, TokenArgs};

const MOST_HOSTS: usize = 4096;
/// More devices than divide experts.
const MOST_DIVIDING: usize = 1 << 16;
/// The --rendezvous of which a launcher's variables say the rest.
const BY_VARIABLES: &str = "env";

/// Options of `mrope finetune`.
#[derive(Clone, Debug, Args)]
pub(crate) struct FinetuneArgs {
    #[command(flatten)]
    pub(super) run: FinetuneConfig,

    /// Device: cpu, gpu (the first GPU), gpu:N, ascend (the first NPU), ascend:N, ascend-sim (a
    /// simulated NPU), ascend-sim:N, or remote:ws://HOST:PORT (a device that `mrope serve` serves).
    /// Repeatable; each device takes a part of every batch
    #[arg(long, help_heading = "Devices", default_value = "cpu")]
    pub(super) device: Vec<Device>,

    #[command(flatten, next_help_heading = "Devices")]
    pub(super) token: TokenArgs,

    /// Number of hosts, each of which runs this command
    #[arg(long, help_heading = "Devices", value_name = "N", default_value_t = 1, value_parser = count_in(1..=MOST_HOSTS))]
    #[arg(requires = "rendezvous")]
    pub(super) hosts: usize,

    /// Index of this host, from 0
    #[arg(long, help_heading = "Devices", value_name = "R", default_value_t = 0)]
    pub(super) host: usize,

    /// Rendezvous: address and free port of host 0; env: from a launcher's MASTER_ADDR and
    /// MASTER_PORT, with --hosts from WORLD_SIZE and --host from RANK
    #[arg(long, help_heading = "Devices", value_name = "HOST:PORT")]
    pub(super) rendezvous: Option<String>,

    /// Maximum wait for other ranks in a step
    #[arg(long, help_heading = "Devices", value_name = "SECONDS", default_value_t = 600, value_parser = count_in(1..=86_400))]
    pub(super) rank_timeout: usize,

    /// Tensors of which each device keeps a shard
    #[arg(
        long,
        help_heading = "Devices",
        value_enum,
        value_name = "TENSORS",
        default_value_t
    )]
    #[arg(default_value_if("shard_optimizer", "true", "optimizer"))]
    pub(super) shard: Sharding,
    /// As --shard optimizer
    #[arg(long, hide = true, conflicts_with = "shard")]
    shard_optimizer: bool,

    /// Expert parallelism: devices per copy of the experts
    #[arg(long, help_heading = "Devices", value_name = "N", default_value_t = 1, value_parser = count_in(1..=MOST_DIVIDING))]
    pub(super) expert_parallel: usize,

    /// Context parallelism: devices per micro-batch
    #[arg(long, help_heading = "Devices", value_name = "N", default_value_t = 1, value_parser = count_in(1..=MOST_DIVIDING))]
    pub(super) context: usize,

    /// File of options, in TOML, such as micro-tokens = 2048; options given here win. Each run
    /// writes its own
    #[arg(long, help_heading = "Output", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(super) options: Option<PathBuf>,

    /// Print no progress; warnings and errors remain
    #[arg(long, help_heading = "Output")]
    pub(super) quiet: bool,

    /// Dry run: print the memory of a step, from shapes alone, and the largest micro-batch that fits
    #[arg(long, help_heading = "Dry runs", conflicts_with_all = ["prove_cut", "prove_same"])]
    pub(super) plan: bool,

    /// Memory of the device, for --plan [default: what this machine has available]
    #[arg(long, help_heading = "Dry runs", value_name = "GIB", requires = "plan", value_parser = above_0)]
    pub(super) memory: Option<f64>,

    /// Dry run: compute one step in four cuts, and print the largest differences
    #[arg(long, help_heading = "Dry runs")]
    pub(super) prove_cut: bool,

    /// Dry run: answer the first batch, and print how many tokens have other log-probabilities as
    /// generated, scored and trained on
    #[arg(long, help_heading = "Dry runs", conflicts_with = "prove_cut")]
    pub(super) prove_same: bool,

    /// All of these as a file of options.
    #[arg(skip)]
    pub(crate) written: String,
}

impl FinetuneArgs {
    /// True if more than one device computes.
    pub(super) fn is_several(&self) -> bool {
        self.device.len() > 1 || self.hosts > 1
    }

    /// True if the plan is of all that a step does; it has no answers that are sampled.
    pub(super) fn is_planned(&self) -> bool {
        !matches!(self.run.loss.loss, LossChoice::Policy(_))
    }

    /// Fills in `--hosts`, `--host` and the address of `--rendezvous env` from the variables that
    /// torchrun and similar launchers set. Each process is a host; LOCAL_RANK is added to the number
    /// of its NPU.
    ///
    /// # Errors
    /// For a variable that is missing or no number, and options that say the same.
    pub(super) fn with_variables(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        if self.rendezvous.as_deref() != Some(BY_VARIABLES) {
            return Ok(self.clone());
        }
        if self.hosts != 1 || self.host != 0 {
            return Err(
                "--rendezvous env takes hosts and host from WORLD_SIZE and RANK; leave --hosts and \
                 --host out"
                    .to_owned(),
            );
        }
        let text = |name: &str| {
            variable(name).ok_or_else(|| {
                format!("--rendezvous env needs the variable {name}, which launchers set")
            })
        };
        let number = |name: &str, text: String, most: usize| match text.parse::<usize>() {
            Ok(number) if number <= most => Ok(number),
            _ => Err(format!(
                "{name} is {text:?}, expected a number of at most {most}"
            )),
        };
        let required = |name: &str, most: usize| number(name, text(name)?, most);
        let port = required("MASTER_PORT", usize::from(u16::MAX) - 1)?;
        // torchrun's own store is at MASTER_PORT then.
        let is_taken = variable("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
        let address = text("MASTER_ADDR")?;
        let address = if address.contains(':') {
            format!("[{address}]")
        } else {
            address
        };
        let mut args = self.clone();
        args.rendezvous = Some(format!("{address}:{}", port + usize::from(is_taken)));
        args.hosts = required("WORLD_SIZE", MOST_HOSTS)?.max(1);
        args.host = required("RANK", MOST_HOSTS)?;
        let refuses = |device| args.token.expect_used(device).is_err();
        if args.hosts == 1 && args.device.iter().all(refuses) {
            // The command is the same for any number of hosts, and one has nobody to meet.
            args.token = TokenArgs::default();
        }
        let Some(local) = variable("LOCAL_RANK") else {
            return Ok(args);
        };
        let local = number("LOCAL_RANK", local, MOST_HOSTS)? as u16;
        match &mut args.device[..] {
            [Device::Ascend(npu) | Device::AscendSim(npu)] => *npu = npu.saturating_add(local),
            [_] => {}
            several if local > 0 => {
                return Err(format!(
                    "LOCAL_RANK is {local}, and each process has {} devices; start one process per \
                     host, or name one --device",
                    several.len()
                ));
            }
            _ => {}
        }
        Ok(args)
    }

    /// The devices of all hosts, and the shards that each keeps.
    pub(super) fn ranks(&self) -> RunRanks {
        RunRanks {
            all: self.hosts * self.device.len(),
            sharding: self.shard,
            expert_parallel: self.expert_parallel,
            context: self.context,
            // A proof writes nothing.
            writes: self.host == 0 && !self.proves(),
        }
    }

    /// True for a dry run that computes.
    pub(super) fn proves(&self) -> bool {
        self.prove_cut || self.prove_same
    }

    /// Bytes that HCCL takes of each NPU for itself.
    pub(super) fn hccl_bytes(&self) -> usize {
        let is_npu = matches!(self.device[0], Device::Ascend(_) | Device::AscendSim(_));
        if is_npu && self.is_several() {
            CommunicatorOptions::new(1, 0).bytes()
        } else {
            0
        }
    }

    /// The options as a file, with those of adapters that were left out.
    pub(super) fn written(&self, trained: &TrainedParts) -> String {
        let TrainedParts::Lora(config) = trained else {
            return self.written.clone();
        };
        let Ok(mut table) = self.written.parse::<toml::Table>() else {
            return self.written.clone();
        };
        let mut show = |name: &str, value: toml::Value| {
            table.entry(name.to_owned()).or_insert(value);
        };
        show("rank", (config.rank as i64).into());
        show("alpha", config.alpha.into());
        show("dropout", config.dropout.into());
        table.to_string()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: FinetuneArgs,
    }

    fn read(options: &str, variables: &[(&str, &str)]) -> Result<FinetuneArgs, String> {
        let fixed = "finetune model --data data --out out --rendezvous env";
        let line = fixed.split_whitespace().chain(options.split_whitespace());
        let args = Line::try_parse_from(line).expect("it parses").args;
        args.with_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_launchers_variables_say_who_meets_where() {
        let two = [
            ("MASTER_ADDR", "fe80::1"),
            ("MASTER_PORT", "29500"),
            ("WORLD_SIZE", "4"),
            ("RANK", "3"),
        ];
        let args = read("--device ascend:2", &two).expect("complete");
        assert_eq!((args.hosts, args.host), (4, 3));
        assert_eq!(args.rendezvous.as_deref(), Some("[fe80::1]:29500"));
        assert_eq!(args.device, [Device::Ascend(2)]);
        let torchrun_variables = [
            &two[..],
            &[
                ("LOCAL_RANK", "1"),
                ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ],
        ];
        let args = read("--device ascend:2", &torchrun_variables.concat()).expect("complete");
        assert_eq!(args.rendezvous.as_deref(), Some("[fe80::1]:29501"));
        assert_eq!(args.device, [Device::Ascend(3)]);
        let alone = [&two[..2], &[("WORLD_SIZE", "1"), ("RANK", "0")]].concat();
        for (device, has_token) in [("ascend", false), ("remote:ws://h:1", true)] {
            let options = format!("--device {device} --token-file f");
            let args = read(&options, &alone).expect("complete");
            assert_eq!(args.token != TokenArgs::default(), has_token, "{device}");
        }
        for (options, variables, says) in [
            ("", &two[..3], "needs the variable RANK"),
            ("--hosts 2", &two[..], "leave --hosts and --host out"),
            (
                "",
                &[&[("MASTER_PORT", "x")], &two[..]].concat(),
                "MASTER_PORT is \"x\", expected a number of at most 65534",
            ),
            (
                "--device ascend --device ascend:1",
                &torchrun_variables.concat(),
                "each process has 2 devices",
            ),
        ] {
            let error = read(options, variables).map(drop).expect_err(says);
            assert!(error.contains(says), "{error}");
        }
    }
}
