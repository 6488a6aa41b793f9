//! Keys in the messages of libraries, and the options that set them.

const KEYS: [(&str, &str); 13] = [
    ("`allow_truncated`", "--allow-truncated"),
    ("`betas[0]`", "--betas"),
    ("`betas[1]`", "--betas"),
    ("`epsilon`", "--epsilon"),
    ("`least_share`", "--least-rate"),
    ("`max_norm`", "--max-norm"),
    ("`max_tokens`", "--max-tokens"),
    ("`rates.decoder`", "--learning-rate"),
    ("`rates.merger`", "--merger-rate"),
    ("`rates.tower`", "--tower-rate"),
    ("`router_loss`", "--router-loss"),
    ("`warmup_steps`", "--warmup-steps"),
    ("`weight_decay`", "--weight-decay"),
];

/// A message with options in place of keys such as `max_tokens`.
pub fn in_options(message: String) -> String {
    let replace = |text: String, (key, option): &(&str, &str)| text.replace(key, option);
    KEYS.iter().fold(message, replace)
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command};

    use super::*;
    use crate::job::FinetuneConfig;

    #[test]
    fn each_key_has_an_option() {
        let command = FinetuneConfig::augment_args(Command::new("finetune"));
        for (key, option) in KEYS {
            let mut names = command.get_arguments().filter_map(clap::Arg::get_long);
            assert!(names.any(|name| option == format!("--{name}")), "{option}");
            assert_eq!(in_options(format!("{key} is 1")), format!("{option} is 1"));
        }
    }
}
