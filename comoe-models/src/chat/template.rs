//! A model's chat template: Jinja that turns messages into the text the model was trained on.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde::Serialize;

use super::json::python_json;
use crate::error::{Error, Result};

/// Steps that a template may take: a few hundred times what real ones need for a full context, and still well under
/// a second.
const FUEL: u64 = 5_000_000;

/// What a template function gives.
type Rendered = std::result::Result<String, minijinja::Error>;

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions before the conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of the person.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: Role::User, content: content.into() }
    }

    /// A message of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: Role::Assistant, content: content.into() }
    }

    /// Instructions.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: Role::System, content: content.into() }
    }
}

/// A compiled chat template and the special tokens that it may name.
///
/// It behaves as `transformers` runs it: `trim_blocks`, `lstrip_blocks`, loop controls, Python's string methods,
/// `raise_exception`, `strftime_now` (in UTC), `tojson` with Python's separators; `{% generation %}` marks are passed
/// over. A template cannot read files or include others, and one that does not end is stopped.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    special: Vec<(String, String)>,
}

impl ChatTemplate {
    /// Looks in a model folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (a text, or a
    /// list of named ones of which `default` is taken). `None` when there is neither.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a file that cannot be read as such, [`Error::Template`] for a template that does not
    /// compile.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join("tokenizer_config.json");
        let config = match read_optional(&path)? {
            None => serde_json::Value::Null,
            Some(text) => serde_json::from_str(&text)
                .map_err(|e| Error::bad_file(&path, format!("not valid JSON: {e}")))?,
        };
        let source = match read_optional(&folder.join("chat_template.jinja"))? {
            Some(text) => Some(text),
            None => template_of(&config["chat_template"]).map_err(|reason| Error::bad_file(&path, reason))?,
        };
        source.map(|s| Self::new(&s, special_tokens(&config))).transpose()
    }

    /// Compiles a template. `special` holds variables such as `bos_token` and their texts.
    ///
    /// # Errors
    /// [`Error::Template`].
    pub fn new(source: &str, special: Vec<(String, String)>) -> Result<Self> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        env.set_syntax(syntax);
        env.set_fuel(Some(FUEL));
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_function("raise_exception", |reason: String| -> Rendered {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        env.add_function("strftime_now", |format: String| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
            strftime(now, &format)
        });
        env.add_filter("tojson", |value: Value, options: Kwargs| -> Rendered {
            let indent = options.get::<Option<usize>>("indent")?;
            let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
            options.assert_all_used()?;
            python_json(&value, indent, ascii)
                .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e))
        });
        env.add_template_owned("chat", without_generation_marks(source)).map_err(failed)?;
        Ok(Self { env, special })
    }

    /// The text of a conversation; `ask` appends the beginning of the model's next message.
    ///
    /// The text holds the special tokens already: tokenise it without adding more.
    ///
    /// # Errors
    /// [`Error::Template`]: the template refuses (its own words) or fails.
    pub fn render(&self, messages: &[Message], ask: bool) -> Result<String> {
        let mut context: std::collections::BTreeMap<&str, Value> =
            self.special.iter().map(|(k, v)| (k.as_str(), Value::from(v.as_str()))).collect();
        context.insert("messages", Value::from(Serde(messages)));
        context.insert("add_generation_prompt", ask.into());
        self.env.get_template("chat").and_then(|t| t.render(context)).map_err(failed)
    }
}

fn failed(e: minijinja::Error) -> Error {
    let reason = match (e.kind(), e.detail()) {
        (ErrorKind::OutOfFuel, _) => "it does not end (stopped)".to_owned(),
        (_, Some(detail)) => match e.line() {
            Some(line) => format!("{detail} (line {line})"),
            None => detail.to_owned(),
        },
        _ => e.to_string(),
    };
    Error::Template { reason }
}

fn read_optional(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(path, e)),
    }
}

fn template_of(value: &serde_json::Value) -> std::result::Result<Option<String>, String> {
    match value {
        serde_json::Value::Null => Ok(None),
        serde_json::Value::String(s) => Ok(Some(s.clone())),
        serde_json::Value::Array(named) => {
            let default = named.iter().find(|t| t["name"] == "default").or(named.first());
            match default.and_then(|t| t["template"].as_str()) {
                Some(s) => Ok(Some(s.to_owned())),
                None => Err("chat_template is a list without a template".into()),
            }
        }
        _ => Err("chat_template is neither a text nor a list of named texts".into()),
    }
}

/// Every `..._token` of `tokenizer_config.json`, written as a text or as an object with `content`.
fn special_tokens(config: &serde_json::Value) -> Vec<(String, String)> {
    let Some(fields) = config.as_object() else { return Vec::new() };
    let text = |v: &serde_json::Value| v.as_str().or_else(|| v["content"].as_str()).map(str::to_owned);
    fields
        .iter()
        .filter(|(k, _)| k.ends_with("_token"))
        .filter_map(|(k, v)| Some((k.clone(), text(v)?)))
        .collect()
}

/// Turns `{% generation %}` and `{% endgeneration %}` (marks for training, unknown to minijinja) into a block that
/// always runs; whitespace control stays.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        match tag[2..end].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()) {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

/// Formats seconds since 1970 (UTC) by the common `strftime` letters; others are left as they are.
fn strftime(seconds: u64, format: &str) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let weekday = DAYS[(days % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&format!("{:02}", year % 100)),
            Some('m') => out.push_str(&format!("{month:02}")),
            Some('d') => out.push_str(&format!("{day:02}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('H') => out.push_str(&format!("{hour:02}")),
            Some('M') => out.push_str(&format!("{minute:02}")),
            Some('S') => out.push_str(&format!("{second:02}")),
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day since 1970-01-01 (H. Hinnant, "chrono-compatible low-level date algorithms").
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let era = z / 146_097;
    let doe = z % 146_097;
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &[Message]) -> Result<String> {
        let special = vec![("bos_token".into(), "<s>".into()), ("eos_token".into(), "</s>".into())];
        ChatTemplate::new(source, special)?.render(messages, true)
    }

    fn talk() -> Vec<Message> {
        vec![
            Message::system("Be brief."),
            Message::user("Hi"),
            Message::assistant("<think>\nhm\n</think>\n\nHello"),
            Message::user("Bye"),
        ]
    }

    #[test]
    fn chatml() {
        let t = "{% for message in messages %}\n    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] \
                 + '<|im_end|>' + '\\n' }}\n{% endfor %}\n{% if add_generation_prompt %}\n    \
                 {{- '<|im_start|>assistant\\n' }}\n{% endif %}";
        assert_eq!(
            render(t, &[Message::user("Hi"), Message::assistant("Yo")]).unwrap(),
            "    <|im_start|>user\nHi<|im_end|>\n\n    <|im_start|>assistant\nYo<|im_end|>\n\n\
             <|im_start|>assistant\n\n"
        );
    }

    #[test]
    fn reversed_lists_namespaces_and_python_methods_as_in_qwen3() {
        let t = r"
{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
";
        assert_eq!(
            render(t, &talk()).unwrap(),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
             <|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn special_tokens_refusals_and_loop_controls_as_in_mistral() {
        let t = "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}\
                 {% if (m.role == 'user') != (loop.index0 % 2 == 1) %}\
                 {{ raise_exception('Roles must alternate!') }}{% endif %}\
                 {% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
                 {% else %}{{ m.content.split('\\n')[-1] + eos_token }}{% endif %}{% endfor %}";
        assert_eq!(render(t, &talk()).unwrap(), "<s>[INST] Hi [/INST]Hello</s>[INST] Bye [/INST]");
        let e = render(t, &[Message::system("x"), Message::assistant("y")]).unwrap_err().to_string();
        assert!(e.contains("Roles must alternate!"), "{e}");
    }

    #[test]
    fn json_dates_and_generation_marks() {
        let t = "{{ messages[0] | tojson }}{%- generation -%} in {% endgeneration %}{{ [1] | tojson(indent=2) }}\
                 {{ strftime_now('%Y') | int > 2000 }}";
        assert_eq!(
            render(t, &[Message::user("é")]).unwrap(),
            "{\"role\": \"user\", \"content\": \"é\"}in [\n  1\n]True"
                .replace("True", &render("{{ true }}", &[]).unwrap())
        );
        assert_eq!(strftime(0, "%d %b %Y %H:%M:%S %A %q %%"), "01 Jan 1970 00:00:00 Thursday %q %");
        assert_eq!(
            strftime(951_826_153, "%a %Y-%m-%d %H:%M:%S %B %y"),
            "Tue 2000-02-29 12:09:13 February 00"
        );
        assert_eq!(strftime(4_107_542_399, "%Y-%m-%d"), "2100-02-28");
        assert_eq!(strftime(4_107_542_400, "%Y-%m-%d"), "2100-03-01");
    }

    #[test]
    fn a_template_cannot_run_for_ever_or_reach_outside() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x\
                       {% endfor %}{% endfor %}{% endfor %}";
        let e = render(endless, &[]).unwrap_err().to_string();
        assert!(e.contains("does not end"), "{e}");
        assert!(render("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", &[]).is_err());
        assert!(render("{% include '/etc/hostname' %}", &[]).is_err());
        assert!(render("{{ open('/etc/hostname') }}", &[]).is_err());
        assert!(render("{% if %}", &[]).is_err());
        assert!(render("{{ messages[0].content.nonsense() }}", &[Message::user("x")]).is_err());
    }

    #[test]
    fn templates_are_found_where_models_keep_them() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let found = || ChatTemplate::find(dir.path()).unwrap().map(|t| t.render(&[], false).unwrap());
        assert_eq!(found(), None);
        put("tokenizer_config.json", r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>"}"#);
        assert_eq!(found(), None);
        put("tokenizer_config.json", r#"{"eos_token": "<e>", "chat_template": "{{ eos_token }}1"}"#);
        assert_eq!(found().unwrap(), "<e>1");
        put(
            "tokenizer_config.json",
            r#"{"bos_token": {"content": "<b>"}, "chat_template":
                [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ bos_token }}2"}]}"#,
        );
        assert_eq!(found().unwrap(), "<b>2");
        put("chat_template.jinja", "{{ bos_token }}3");
        assert_eq!(found().unwrap(), "<b>3");
        put("tokenizer_config.json", "{");
        assert!(ChatTemplate::find(dir.path()).is_err());
    }
}
