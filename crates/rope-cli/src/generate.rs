//! `mrope generate`: a model answers prompts.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueHint};
use serde_json::json;
use vlm_data::text::{Answers, Conversation, Conversations, FileOptions, Message, Role};
use vlm_data::{Cut, MicroBatch, SampleEncoder, TrainingSample};
use vlm_models::{GenerateOptions, GenerationConfig, Sampling, Vlm};
use vlm_train::{AnswerStream, answer_text, before_stop, last_answer, stop_tokens};

use crate::arguments::{MAX_TOKENS, complaint, count_in, seed};
use crate::model::ModelArgs;
use crate::stdio::{note, plain, stdout};
use vlm_train::job::RecordOptions;

/// Options of `mrope generate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,

    /// Pictures of the prompt, before its text
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with = "data", value_hint = ValueHint::FilePath)]
    image: Vec<PathBuf>,

    /// Text of the user's message
    #[arg(
        long,
        value_name = "TEXT",
        required_unless_present = "data",
        conflicts_with = "data"
    )]
    prompt: Option<String>,

    /// Text of the system message before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "data")]
    system: Option<String>,

    /// Conversations whose last answers to generate and print beside the file's
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    data: Option<PathBuf>,

    /// Number of conversations of --data to answer, from the first [default: all]
    #[arg(long, value_parser = count_in(1..=usize::MAX), requires = "data")]
    limit: Option<usize>,

    /// Conversations per batch
    #[arg(long, default_value_t = 4, value_parser = count_in(1..=65_536))]
    batch: usize,

    /// Maximum tokens per answer
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    #[arg(value_parser = count_in(1..=MAX_TOKENS))]
    max_new: usize,

    /// Sample tokens from logits divided by this; without it, take the most likely token
    #[arg(long)]
    temperature: Option<f64>,

    /// Sample from this number of most likely tokens [default: all]
    #[arg(long, value_name = "TOKENS", requires = "temperature")]
    #[arg(value_parser = count_in(1..=MAX_TOKENS))]
    top_k: Option<usize>,

    /// Sample from the most likely tokens with this total probability
    #[arg(
        long,
        value_name = "SHARE",
        default_value_t = 1.0,
        requires = "temperature"
    )]
    top_p: f64,

    /// Seed of the samples
    #[arg(long, default_value_t = 0, value_parser = seed())]
    seed: u64,

    /// Penalty of tokens already present: divides their logits above 0, multiplies others [default:
    /// that of generation_config.json, else 1]
    #[arg(long, value_name = "FACTOR")]
    repetition_penalty: Option<f64>,

    #[command(flatten)]
    records: RecordOptions,

    /// Print one JSON object per line: line, reference (of --data), answer, tokens,
    /// log_probabilities
    #[arg(long)]
    json: bool,

    /// With --json, also print the log-probabilities of this number of likeliest tokens at each
    /// place
    #[arg(long, value_name = "TOKENS", requires = "json")]
    #[arg(value_parser = count_in(1..=MAX_TOKENS))]
    likeliest: Option<usize>,
}

/// A question, and the answer that a file has to it.
struct Question {
    line: u64,
    text: String,
    reference: Option<String>,
    sample: TrainingSample,
}

/// The tokens and answers generated, and the time that they took.
struct Speed {
    started: Instant,
    prompt_tokens: usize,
    tokens: usize,
    answers: usize,
    /// Answers equal to the file's.
    equal: usize,
}

impl GenerateArgs {
    fn options(&self, encoder: &SampleEncoder) -> Result<GenerateOptions, Box<dyn Error>> {
        let config = GenerationConfig::from_folder(&self.model.folder)?;
        for key in &config.ignored {
            note(format_args!(
                "warning: generation_config.json has {key}, which is not applied"
            ));
        }
        Ok(GenerateOptions {
            count: self.max_new,
            stop: stop_tokens(&config, encoder),
            repetition_penalty: self
                .repetition_penalty
                .or(config.repetition_penalty)
                .unwrap_or(1.0),
            sampling: self.temperature.map(|temperature| Sampling {
                temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                seed: self.seed,
                rows: Vec::new(),
            }),
            likeliest: self.json.then(|| self.likeliest.unwrap_or(0)),
        })
    }

    /// The conversation of --prompt and --image, as a record of data.
    ///
    /// # Errors
    /// If the prompt marks other than the given pictures.
    fn conversation(&self, prompt: &str) -> Result<Conversation, Box<dyn Error>> {
        let is_marked = prompt.contains("<image>");
        let marks = "<image>".repeat(if is_marked { 0 } else { self.image.len() });
        let system = self.system.iter();
        let system = system.map(|text| json!({ "role": "system", "content": text }));
        let user = json!({ "role": "user", "content": marks + prompt });
        // A record ends with an answer, which is yet to come here.
        let answer = json!({ "role": "assistant", "content": "?" });
        let record = json!({
            "messages": system.chain([user, answer]).collect::<Vec<_>>(),
            "images": self.image,
        });
        let record = record.to_string();
        let mut read = Conversations::new(record.as_bytes(), "", &FileOptions::default());
        let mut conversation = read.next().ok_or("the prompt is empty")??;
        conversation.messages.pop();
        Ok(conversation)
    }
}

/// Answers, and tells how fast.
///
/// # Errors
/// Those of the folder, the adapter, the prompt or data, and the device, each with what to do.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Box<dyn Error>> {
    let samples = args.records.samples(None);
    let encoder = SampleEncoder::from_folder(&args.model.folder, samples)?;
    let options = args.options(&encoder)?;
    let index = match &args.data {
        Some(path) => Some(args.records.open(path, Answers::Any)?),
        None => None,
    };
    // Wrong prompts are told before weights are loaded.
    let first = match &args.prompt {
        Some(prompt) => {
            let conversation = args.conversation(prompt)?;
            vec![question(&encoder, &conversation, None)?]
        }
        None => Vec::new(),
    };
    let (_held, model) = args.model.load()?;
    let mut speed = Speed {
        started: Instant::now(),
        prompt_tokens: 0,
        tokens: 0,
        answers: 0,
        equal: 0,
    };
    match &index {
        None => answer(args, &model, &encoder, &options, &first, &mut speed)?,
        Some(index) => {
            let mut reader = index.reader()?;
            let count = args.limit.unwrap_or(usize::MAX).min(index.len());
            let records: Vec<usize> = (0..count).collect();
            for batch in records.chunks(args.batch) {
                let mut questions = Vec::with_capacity(batch.len());
                for record in batch {
                    let asked = reader.read(*record).map_err(Into::into);
                    let asked = asked.and_then(|conversation| {
                        let reference = last_answer(&encoder, &conversation, &options.stop)?;
                        question(&encoder, &conversation, Some(reference))
                    });
                    match asked {
                        Ok(question) => questions.push(question),
                        Err(error) if args.records.leaves_out(&*error) => {
                            note(format_args!("warning: left out: {}", complaint(&error)));
                        }
                        Err(error) => return Err(error),
                    }
                }
                if questions.is_empty() {
                    continue;
                }
                answer(args, &model, &encoder, &options, &questions, &mut speed)?;
            }
        }
    }
    let seconds = speed.started.elapsed().as_secs_f64();
    if index.is_some() {
        let Speed { equal, answers, .. } = speed;
        note(format_args!(
            "{equal} of {answers} answers equal those in the file"
        ));
    }
    note(format_args!(
        "{} tokens in {seconds:.2} s after {} prompt tokens, {:.1} tokens/s",
        speed.tokens,
        speed.prompt_tokens,
        speed.tokens as f64 / seconds.max(1e-9)
    ));
    Ok(())
}

fn question(
    encoder: &SampleEncoder,
    conversation: &Conversation,
    reference: Option<String>,
) -> Result<Question, Box<dyn Error>> {
    let is_user = |message: &&Message| message.role == Role::User;
    let last = conversation.messages.iter().rfind(is_user);
    Ok(Question {
        line: conversation.line,
        text: last.map(Message::text).unwrap_or_default(),
        reference,
        sample: encoder.encode_prompt(conversation)?,
    })
}

/// Answers some questions at once, and shows the answers. A single one is shown as it comes.
fn answer(
    args: &GenerateArgs,
    model: &Vlm,
    encoder: &SampleEncoder,
    options: &GenerateOptions,
    questions: &[Question],
    speed: &mut Speed,
) -> Result<(), Box<dyn Error>> {
    let tokenizer = encoder.text().tokenizer();
    let samples = questions.iter().map(|question| question.sample.clone());
    // All are one batch, however long.
    let tokens = usize::MAX;
    let micro = MicroBatch::new(samples.collect(), Cut::Padded { tokens })?.padded_left();
    let batch = model.batch(&vlm_train::inputs(&micro, &model.device()))?;
    let mut options = options.clone();
    if let Some(sampling) = &mut options.sampling {
        sampling.rows = questions.iter().map(|question| question.line).collect();
    }
    let streams = args.data.is_none() && !args.json;
    let mut stream = AnswerStream::new(tokenizer, &options.stop);
    let show = |text: &str| {
        let mut out = stdout();
        write!(out, "{}", plain(&text)).and_then(|()| out.flush())
    };
    let (mut failed, mut choices) = (None, vec![Vec::new(); questions.len()]);
    let rows = model.generate_with(&batch, &options, &mut |choice| {
        let (row, token) = (choice.row, choice.token);
        choices[row].extend(choice.log_probabilities);
        if streams && failed.is_none() {
            let shown = stream.push(token).map_err(Into::into);
            let shown = shown.and_then(|text| show(&text).map_err(Box::<dyn Error>::from));
            failed = shown.err();
        }
    })?;
    failed.map_or(Ok(()), Err)?;
    if streams {
        writeln!(stdout(), "{}", plain(&stream.finish()?))?;
    }
    speed.prompt_tokens += questions.iter().map(|q| q.sample.tokens()).sum::<usize>();
    let mut out = stdout();
    for ((question, tokens), choices) in questions.iter().zip(rows).zip(choices) {
        speed.answers += 1;
        speed.tokens += tokens.len();
        let answer = answer_text(tokenizer, before_stop(&tokens, &options.stop))?;
        let reference = question.reference.as_ref().map(|text| text.trim());
        speed.equal += usize::from(reference == Some(answer.trim()));
        if args.json {
            let chosen: Vec<f32> = choices.iter().map(|place| place.chosen).collect();
            let mut line = json!({
                "line": question.line,
                "reference": question.reference,
                "answer": answer,
                "tokens": tokens,
                "log_probabilities": chosen,
            });
            if args.likeliest.is_some() {
                let likeliest: Vec<_> = choices.iter().map(|place| &place.likeliest).collect();
                line["likeliest"] = json!(likeliest);
            }
            writeln!(out, "{line}")?;
        } else if let Some(reference) = reference {
            writeln!(
                out,
                "line {}: {}",
                question.line,
                plain(&question.text.trim())
            )?;
            writeln!(out, "  expected  {}", plain(&reference))?;
            writeln!(out, "  answer    {}", plain(&answer.trim()))?;
        }
    }
    Ok(())
}
