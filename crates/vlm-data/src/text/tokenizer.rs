//! The tokenizer of a checkpoint folder.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use super::error::{Result, TextError};
use super::json::Json;

/// The file size limit; Qwen3.5's tokenizer.json has 13 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The pattern by which Qwen2's tokenizer splits text before it merges bytes: a constant of its
/// class in transformers, also for Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
const QWEN2_PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The limit on runs of white space. The pattern looks ahead in them, and the regex engine stops
/// after a million steps, which would leave the text unsplit.
const MAX_SPACES: usize = 100_000;

/// Converter of text to token ids, equivalent to the folder's tokenizer in transformers.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The tokens with names in a chat template: `bos_token`, `eos_token`, `pad_token`, ...
    special: Vec<(String, String)>,
    /// The tokens put before any text that is no chat.
    begin: Vec<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "Tokenizer of {} tokens",
            self.inner.get_vocab_size(true)
        )
    }
}

impl Tokenizer {
    /// Reads the tokenizer of a checkpoint folder: `tokenizer.json`, or `vocab.json` with
    /// `merges.txt` as Qwen2 does (NFC, its pattern, bytes). It includes the tokens added by
    /// `tokenizer_config.json` or `added_tokens.json`.
    ///
    /// # Errors
    /// [`TextError::NoTokenizer`]; [`TextError::File`] if a file cannot be read or parsed;
    /// [`TextError::Tokenizer`] if files contradict each other, such as an id in
    /// `tokenizer_config.json` that belongs to another token.
    ///
    /// # Source
    /// transformers 5.24.0, `tokenization_utils_tokenizers.py` and
    /// `models/qwen2/tokenization_qwen2.py`
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let config = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or(Json::Null);
        let file = folder.join("tokenizer.json");
        let mut inner = match read_file(&file)? {
            Some(bytes) => from_json(&file, &bytes)?,
            None => from_vocabulary(folder, &config)?,
        };
        let begin = begin_of_text(&inner).map_err(|error| refused(&file, error.to_string()))?;
        // Padding and truncation are up to the trainer, not to the file. Without a post-processor,
        // offsets cover whole tokens; transformers adds no special tokens to a chat.
        inner.with_padding(None);
        let failed = |error: tokenizers::Error| TextError::Tokenizer {
            path: folder.to_owned(),
            reason: error.to_string(),
        };
        inner.with_truncation(None).map_err(failed)?;
        inner.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        add_tokens(folder, &config, &mut inner)?;
        let special = special_tokens(&config);
        Ok(Self {
            inner,
            special,
            begin,
        })
    }

    /// The tokens that the folder's tokenizer puts before any text that is no chat, such as Llama's
    /// `<|begin_of_text|>`.
    #[must_use]
    pub fn begin(&self) -> &[u32] {
        &self.begin
    }

    /// Encodes a text. Added tokens in it are recognised; none are added around it.
    ///
    /// # Errors
    /// [`TextError::Encode`] for a run of more than 100,000 white-space characters.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.encode_with_starts(text)?.0)
    }

    /// Encodes a text; also returns the byte offset of each token.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_with_starts(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>)> {
        let refused = |reason: String| TextError::Encode {
            bytes: text.len(),
            reason,
        };
        let mut spaces = 0;
        for c in text.chars() {
            spaces = if c.is_whitespace() { spaces + 1 } else { 0 };
            if spaces > MAX_SPACES {
                return Err(refused(format!(
                    "it has more than {MAX_SPACES} spaces in a row"
                )));
            }
        }
        let encoding = self
            .inner
            .encode(text, false)
            .map_err(|error| refused(error.to_string()))?;
        let starts = encoding
            .get_offsets()
            .iter()
            .map(|&(start, _)| start)
            .collect();
        Ok((encoding.get_ids().to_vec(), starts))
    }

    /// Decodes ids to text, added tokens included.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer rejects the ids. Ids without a token are skipped.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let refused = |error: tokenizers::Error| TextError::Encode {
            bytes: 4 * ids.len(),
            reason: error.to_string(),
        };
        self.inner.decode(ids, false).map_err(refused)
    }

    /// The id of a token, in its internal spelling.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// True if `token` is an added token, which is recognised in any text.
    #[must_use]
    pub fn is_added(&self, token: &str) -> bool {
        self.inner
            .get_added_vocabulary()
            .get_vocab()
            .contains_key(token)
    }

    /// The number of tokens, added tokens included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The tokens that `tokenizer_config.json` names, such as `eos_token`.
    #[must_use]
    pub fn named_tokens(&self) -> &[(String, String)] {
        &self.special
    }
}

/// The tokens that a tokenizer puts before a text.
fn begin_of_text(inner: &tokenizers::Tokenizer) -> tokenizers::Result<Vec<u32>> {
    let encoding = inner.encode("a", true)?;
    let ids = encoding
        .get_ids()
        .iter()
        .zip(encoding.get_special_tokens_mask());
    Ok(ids
        .take_while(|(_, added)| **added == 1)
        .map(|(id, _)| *id)
        .collect())
}

/// Reads a file; none if it does not exist.
pub(super) fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    match plain_files::read(path, MAX_FILE_BYTES) {
        Err(error) if error.is_missing() => Ok(None),
        read => Ok(Some(read?)),
    }
}

/// Reads a JSON file; none if it does not exist.
pub(super) fn read_json(path: &Path) -> Result<Option<Json>> {
    let Some(bytes) = read_file(path)? else {
        return Ok(None);
    };
    let error = |error: serde_json::Error| TextError::File {
        path: path.to_owned(),
        reason: error.to_string(),
    };
    Json::parse(&bytes).map(Some).map_err(error)
}

fn refused(path: &Path, reason: impl Into<String>) -> TextError {
    TextError::Tokenizer {
        path: path.to_owned(),
        reason: reason.into(),
    }
}

/// The part of a tokenizer.json that its parser does not verify.
#[derive(Deserialize)]
struct Outline {
    model: OutlineModel,
    #[serde(default)]
    added_tokens: Vec<OutlineToken>,
}

#[derive(Deserialize)]
struct OutlineModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: HashMap<String, u32>,
    #[serde(default)]
    merges: Vec<Merge>,
    continuing_subword_prefix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Line(String),
}

#[derive(Deserialize)]
struct OutlineToken {
    id: u32,
    content: String,
}

fn from_json(path: &Path, bytes: &[u8]) -> Result<tokenizers::Tokenizer> {
    let outline: Outline = serde_json::from_slice(bytes).map_err(|error| TextError::File {
        path: path.to_owned(),
        reason: format!("expected a byte-pair tokenizer: {error}"),
    })?;
    let model = outline.model;
    if model.kind.is_some_and(|kind| kind != "BPE") {
        return Err(refused(path, "expected a model of type BPE"));
    }
    if model
        .continuing_subword_prefix
        .is_some_and(|prefix| !prefix.is_empty())
    {
        return Err(refused(
            path,
            "a prefix of continued words is not supported",
        ));
    }
    let merges: Vec<_> = model
        .merges
        .iter()
        .map(|merge| match merge {
            Merge::Pair(left, right) => Ok((left.as_str(), right.as_str())),
            Merge::Line(line) => line
                .split_once(' ')
                .ok_or_else(|| refused(path, format!("merge {line:?} is not two tokens"))),
        })
        .collect::<Result<_>>()?;
    check_merges(path, &model.vocab, &merges)?;
    let inner = tokenizers::Tokenizer::from_bytes(bytes)
        .map_err(|error| refused(path, error.to_string()))?;
    // The parser assigns the next free id to an added token, whatever the file states.
    for token in &outline.added_tokens {
        check_id(path, &inner, &token.content, token.id)?;
    }
    Ok(inner)
}

/// Checks that merges combine tokens of the vocabulary into tokens of the vocabulary: the crate's
/// builder panics on some that do not.
fn check_merges(path: &Path, vocab: &HashMap<String, u32>, merges: &[(&str, &str)]) -> Result<()> {
    let mut merged = String::new();
    for (left, right) in merges {
        merged.clear();
        merged.push_str(left);
        merged.push_str(right);
        for token in [*left, *right, merged.as_str()] {
            if !vocab.contains_key(token) {
                let reason =
                    format!("merge {left:?} {right:?} needs {token:?}, which is not a token");
                return Err(refused(path, reason));
            }
        }
    }
    Ok(())
}

fn check_id(path: &Path, inner: &tokenizers::Tokenizer, token: &str, id: u32) -> Result<()> {
    match inner.token_to_id(token) {
        Some(found) if found == id => Ok(()),
        found => {
            let found = found.map_or("none".to_owned(), |found| found.to_string());
            let reason = format!(
                "expected added token {token:?} to have id {id}, found {found}; \
                 take all files from one checkpoint"
            );
            Err(refused(path, reason))
        }
    }
}

fn from_vocabulary(folder: &Path, config: &Json) -> Result<tokenizers::Tokenizer> {
    let (vocab_path, merges_path) = (folder.join("vocab.json"), folder.join("merges.txt"));
    let (Some(vocab), Some(merges)) = (read_file(&vocab_path)?, read_file(&merges_path)?) else {
        return Err(TextError::NoTokenizer {
            folder: folder.to_owned(),
        });
    };
    let class = config
        .get("tokenizer_class")
        .and_then(Json::as_str)
        .unwrap_or("Qwen2Tokenizer");
    if !matches!(class, "Qwen2Tokenizer" | "Qwen2TokenizerFast") {
        let reason =
            format!("expected tokenizer.json for the class {class}; only Qwen2's needs none");
        return Err(refused(folder, reason));
    }
    let unreadable = |path: &PathBuf, reason: String| TextError::File {
        path: path.clone(),
        reason,
    };
    let vocab: HashMap<String, u32> = serde_json::from_slice(&vocab)
        .map_err(|error| unreadable(&vocab_path, error.to_string()))?;
    let merges =
        String::from_utf8(merges).map_err(|error| unreadable(&merges_path, error.to_string()))?;
    let mut pairs = Vec::new();
    for (index, line) in merges.lines().enumerate() {
        // The first line may be a version. A later "#" is a byte like any other.
        if line.is_empty() || (index == 0 && line.starts_with("#version")) {
            continue;
        }
        let Some(pair) = line.split_once(' ') else {
            let reason = format!("line {}: expected two tokens, found {line:?}", index + 1);
            return Err(unreadable(&merges_path, reason));
        };
        pairs.push(pair);
    }
    check_merges(&merges_path, &vocab, &pairs)?;
    let pairs = pairs
        .into_iter()
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .collect();
    let error = |error: tokenizers::Error| refused(folder, error.to_string());
    let model = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<Vocab>(), pairs)
        .build()
        .map_err(error)?;
    let mut inner = tokenizers::Tokenizer::new(model);
    let pattern = SplitPattern::Regex(QWEN2_PATTERN.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(error)?;
    let bytes = ByteLevel::new(false, true, false);
    inner.with_normalizer(Some(NFC)).map_err(error)?;
    inner.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), bytes.into()])));
    inner.with_decoder(Some(ByteLevel::default()));
    Ok(inner)
}

/// Adds the tokens of `tokenizer_config.json`, or of the older `added_tokens.json`.
fn add_tokens(folder: &Path, config: &Json, inner: &mut tokenizers::Tokenizer) -> Result<()> {
    let config_path = folder.join("tokenizer_config.json");
    let mut tokens: Vec<(u32, AddedToken)> = Vec::new();
    let mut path = config_path.clone();
    if let Some(Json::Object(pairs)) = config.get("added_tokens_decoder") {
        for (id, token) in pairs {
            let content = token.get("content").and_then(Json::as_str);
            let (Ok(id), Some(content)) = (id.parse(), content) else {
                let reason = format!("added_tokens_decoder: expected a token at {id:?}");
                return Err(refused(&config_path, reason));
            };
            let flag = |name, default| match token.get(name) {
                Some(Json::Bool(flag)) => *flag,
                _ => default,
            };
            let special = flag("special", false);
            let token = AddedToken::from(content, special)
                .single_word(flag("single_word", false))
                .lstrip(flag("lstrip", false))
                .rstrip(flag("rstrip", false))
                .normalized(flag("normalized", !special));
            tokens.push((id, token));
        }
    } else if let Some(Json::Object(pairs)) = read_json(&folder.join("added_tokens.json"))? {
        path = folder.join("added_tokens.json");
        let named = special_tokens(config);
        for (content, id) in &pairs {
            let Json::Int(number) = id else {
                return Err(refused(&path, format!("expected an id at {content:?}")));
            };
            let Ok(id) = u32::try_from(*number) else {
                return Err(refused(&path, format!("the id of {content:?} is {number}")));
            };
            let special = named.iter().any(|(_, token)| token == content);
            tokens.push((id, AddedToken::from(content.as_str(), special)));
        }
    }
    tokens.sort_by_key(|(id, _)| *id);
    let error = |error: tokenizers::Error| refused(folder, error.to_string());
    let added = tokens.iter().map(|(_, token)| token.clone());
    inner.add_tokens(added).map_err(error)?;
    for (id, token) in &tokens {
        check_id(&path, inner, &token.content, *id)?;
    }
    // Named tokens in no list are added afterwards, as in transformers.
    let extra = ["additional_special_tokens", "extra_special_tokens"]
        .iter()
        .find_map(|key| config.get(key)?.as_array())
        .unwrap_or(&[]);
    let extra = extra.iter().filter_map(token_text).map(str::to_owned);
    let named = special_tokens(config).into_iter().map(|(_, token)| token);
    let after: Vec<_> = named
        .chain(extra)
        .filter(|token| !inner.get_added_vocabulary().get_vocab().contains_key(token))
        .map(|token| AddedToken::from(token, true))
        .collect();
    inner.add_tokens(after).map_err(error)?;
    Ok(())
}

/// The tokens that a tokenizer_config.json names.
fn special_tokens(config: &Json) -> Vec<(String, String)> {
    let Json::Object(pairs) = config else {
        return Vec::new();
    };
    let token = |(name, value): &(String, Json)| {
        let token = token_text(value)?;
        (name.ends_with("_token") && !token.is_empty()).then(|| (name.clone(), token.to_owned()))
    };
    pairs.iter().filter_map(token).collect()
}

/// A token as text or as an object.
fn token_text(value: &Json) -> Option<&str> {
    value
        .as_str()
        .or_else(|| value.get("content").and_then(Json::as_str))
}
