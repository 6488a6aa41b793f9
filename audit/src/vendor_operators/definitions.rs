//! Which functions and variables a C++ source defines, found without compiling it.

/// The functions and variables that `source` defines, by qualified name such as `l0op::Add` or
/// `op::Shape::GetDim`. Those that only the file itself can name are left out, and so are members
/// that a class defines inside its braces.
pub(super) fn definitions(source: &str) -> Vec<String> {
    let code = without_text(source);
    let mut scopes: Vec<Scope> = Vec::new();
    let mut found = Vec::new();
    let mut head = 0;
    let mut at = 0;
    let bytes = code.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            b';' => {
                let path = variable(&code[head..at]);
                found.extend(path.and_then(|name| qualified(&scopes, name)));
                head = at + 1;
            }
            b'}' => {
                scopes.pop();
                head = at + 1;
            }
            b'{' => {
                let scope = Scope::of(&code[head..at]);
                let name = match &scope {
                    Scope::Function(name) => Some(name.as_str()),
                    Scope::Other => variable(&code[head..at]),
                    _ => None,
                };
                found.extend(name.and_then(|name| qualified(&scopes, name)));
                if matches!(scope, Scope::Function(_) | Scope::Other) {
                    at = end_of_block(bytes, at);
                } else {
                    scopes.push(scope);
                }
                head = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// The name with the namespaces around it; none in an unnamed one, which nothing outside can name.
/// With the linkage of C, namespaces do not count: a header may declare the function without them.
fn qualified(scopes: &[Scope], name: &str) -> Option<String> {
    if scopes.iter().any(|scope| matches!(scope, Scope::Linkage)) {
        return Some(name.to_owned());
    }
    let spaces = scopes.iter().filter_map(Scope::namespace);
    let path: Vec<&str> = spaces.chain([name]).collect();
    (!path.contains(&"")).then(|| path.join("::"))
}

/// The name of the variable that a declaration without its initialiser defines.
fn variable(declaration: &str) -> Option<&str> {
    const NONE: [&str; 11] = [
        "static",
        "extern",
        "using",
        "typedef",
        "class",
        "struct",
        "enum",
        "union",
        "template",
        "namespace",
        "friend",
    ];
    let declared = declaration.split('=').next().unwrap_or_default();
    let declared = declared.split('[').next().unwrap_or_default().trim();
    let first = declared.split_whitespace().next()?;
    let is_variable = !declared.contains('(') && !NONE.contains(&first) && first != declared;
    is_variable.then(|| name_before(declared)).flatten()
}

/// What a brace opens.
enum Scope {
    /// `namespace a::b`, unnamed if empty.
    Namespace(String),
    /// `extern "C"`.
    Linkage,
    Function(String),
    Other,
}

impl Scope {
    /// By the text before the brace, from the end of the declaration before.
    fn of(head: &str) -> Self {
        let head = head.trim();
        let first = head.split_whitespace().next().unwrap_or_default();
        match (first, head.find('(')) {
            ("namespace", _) => Self::Namespace(head["namespace".len()..].trim().to_owned()),
            ("extern", None) => Self::Linkage,
            ("inline", None) if head.contains("namespace") => {
                let (_, name) = head.split_once("namespace").unwrap_or_default();
                Self::Namespace(name.trim().to_owned())
            }
            ("class" | "struct" | "union" | "enum" | "static" | "template" | "typedef", _)
            | (_, None) => Self::Other,
            (_, Some(open)) => match name_before(&head[..open]) {
                Some(name) => Self::Function(name.to_owned()),
                None => Self::Other,
            },
        }
    }

    fn namespace(&self) -> Option<&str> {
        match self {
            Self::Namespace(name) => Some(name),
            _ => None,
        }
    }
}

/// The qualified name that ends `text`, such as `op::Shape::GetDim` or `Object::operator new`.
fn name_before(text: &str) -> Option<&str> {
    let text = text.trim_end();
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '~');
    let last = text.rfind("operator").unwrap_or(text.len());
    let start = text[..last].rfind(|c| !is_part(c)).map_or(0, |at| at + 1);
    let name = &text[start..];
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    // An initialiser is none: `x = f(1) {`.
    (is_name && !text[..start].contains('=')).then_some(name)
}

/// The index of the brace that closes the one at `open`.
fn end_of_block(bytes: &[u8], open: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in bytes.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => continue,
        }
        if depth == 0 {
            return at;
        }
    }
    bytes.len()
}

/// The source without comments, preprocessor lines, and what string and character literals hold.
fn without_text(source: &str) -> String {
    let mut code = String::with_capacity(source.len());
    let mut rest = source;
    let mut line_starts = true;
    while let Some(c) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if c == '#' && line_starts {
            directive_length(rest)
        } else if c == '"' || c == '\'' {
            code.push(' ');
            literal_length(rest, c)
        } else {
            line_starts = c == '\n' || (line_starts && c.is_whitespace());
            code.push(c);
            c.len_utf8()
        };
        rest = &rest[skipped..];
    }
    code
}

/// A directive goes on after a backslash at the end of a line.
fn directive_length(text: &str) -> usize {
    let mut length = 0;
    for line in text.split_inclusive('\n') {
        length += line.len();
        if !line.trim_end().ends_with('\\') {
            // The end of the line stays, so that the next one starts.
            return length - usize::from(line.ends_with('\n'));
        }
    }
    length
}

/// A digit separator, as in 1'000, is read as a character; both quotes of a literal are in `text`
/// otherwise.
fn literal_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\n' => return at,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The qualified name of a demangled symbol, without its parameters.
pub(super) fn name_of(symbol: &str) -> &str {
    let end = symbol.find(['(', '[']).unwrap_or(symbol.len());
    &symbol[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_found_by_qualified_name() {
        let source = r#"
#define OPEN {            \
    NOT_A_FUNCTION() {
// namespace comment { void no() {} }
namespace l0op {
OP_TYPE_REGISTER(Add);
static bool IsSmall(int x) { return x < '{'; }
static const char *text = "void f() {";
const aclTensor *Add(const aclTensor *x, std::map<int, int> m)
{
    if (x) { while (f()) { } }
    return nullptr;
}
namespace { void Hidden() {} }
struct Row { void Inside() {} };
template <typename T> void Generic(T x) {}
thread_local std::map<int, int> Row::rows_;
long counts[3] = {1, 2};
extern int elsewhere;
}
void *op::Object::operator new(size_t bytes) { return Take(bytes); }
namespace op::internal { bool Shape::Has(int i) const { return true; } }
extern "C" { aclnnStatus aclnnAddGetWorkspaceSize(int a) { return 0; } }
aclnnStatus aclnnAdd(void *w);
extern "C" {
namespace {
const long most = 8;
aclnnStatus aclnnFillGetWorkspaceSize(int a) { return 0; }
}
}
"#;
        assert_eq!(
            definitions(source),
            [
                "aclnnAddGetWorkspaceSize",
                "aclnnFillGetWorkspaceSize",
                "l0op::Add",
                "l0op::Row::rows_",
                "l0op::counts",
                "most",
                "op::Object::operator new",
                "op::internal::Shape::Has"
            ]
        );
    }

    #[test]
    fn symbols_lose_their_parameters() {
        assert_eq!(name_of("l0op::Add(aclTensor const*)"), "l0op::Add");
        assert_eq!(name_of("op::Name[abi:cxx11]() const"), "op::Name");
        assert_eq!(name_of("aclrtMemcpy"), "aclrtMemcpy");
    }
}
