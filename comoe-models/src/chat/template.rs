//! A model's chat template: Jinja that turns messages into the text the model was trained on.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, Output, State};
use serde::ser::{Serialize, SerializeMap, Serializer};

use super::json::{PythonJson, python_json};
use super::{python, source};
use crate::error::{Error, Result};
use crate::load::{GgufModel, SideFiles};

/// Steps that a template may take: a few hundred times what real ones need for a full context, and still well under
/// a second.
const FUEL: u64 = 5_000_000;

/// Where a template and its special tokens usually are.
const CONFIG: &str = "tokenizer_config.json";

/// What a template function gives.
type Rendered = std::result::Result<String, minijinja::Error>;

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: String,
    /// What the model thought before it said it. Templates see it as `reasoning_content` and as `thinking`.
    pub reasoning: Option<String>,
}

impl Message {
    /// A message of the person.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: Role::User, content: content.into(), reasoning: None }
    }

    /// A message of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: Role::Assistant, content: content.into(), reasoning: None }
    }

    /// Instructions.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: Role::System, content: content.into(), reasoning: None }
    }
}

/// As `transformers` gives it to templates: with both names of the reasoning, or neither.
impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(reasoning) = &self.reasoning {
            map.serialize_entry("thinking", reasoning)?;
        }
        map.serialize_entry("role", &self.role)?;
        map.serialize_entry("content", &self.content)?;
        if let Some(reasoning) = &self.reasoning {
            map.serialize_entry("reasoning_content", reasoning)?;
        }
        map.end()
    }
}

/// A compiled chat template and the special tokens that it may name.
///
/// It behaves as `transformers` runs it: `trim_blocks`, `lstrip_blocks`, loop controls, Python's string methods and its
/// way to print values, `raise_exception`, `strftime_now` (in UTC), `tojson` with Python's separators; `{% generation %}`
/// marks are passed over. A template cannot read files or include others, and one that does not end is stopped.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    special: Vec<(String, String)>,
    /// Seconds since 1970 that stand for now; unset it is now.
    clock: Arc<OnceLock<u64>>,
}

impl ChatTemplate {
    /// Looks in a model folder: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (a text, or a
    /// list of named ones of which `default` is taken) or of `chat_template.json`. `None` when there is none. Special
    /// tokens are those of `tokenizer_config.json`, and what `special_tokens_map.json` has besides. Or takes the template
    /// of a GGUF file.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a file that cannot be read as such, [`Error::Template`] for a template that does not
    /// compile.
    pub fn find(folder: &Path) -> Result<Option<Self>> {
        if let Some(gguf) = GgufModel::of(folder)? {
            return gguf.template();
        }
        Self::find_in(SideFiles::Folder(folder))
    }

    /// The same, of a model that may be a packed file.
    pub(crate) fn find_in(files: SideFiles<'_>) -> Result<Option<Self>> {
        let json = |name: &str| -> Result<serde_json::Value> {
            match files.text(name)? {
                None => Ok(serde_json::Value::Null),
                Some(text) => serde_json::from_str(&text)
                    .map_err(|e| Error::bad_file(files.path(name), format!("not valid JSON: {e}"))),
            }
        };
        let config = json(CONFIG)?;
        let mut source = files.text("chat_template.jinja")?;
        for name in [CONFIG, "chat_template.json"] {
            if source.is_none() {
                let found = template_of(&json(name)?["chat_template"]);
                source = found.map_err(|reason| Error::bad_file(files.path(name), reason))?;
            }
        }
        let mut special = special_tokens(&json("special_tokens_map.json")?);
        special.extend(special_tokens(&config));
        source.map(|s| Self::new(&s, special.into_iter().collect())).transpose()
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
        env.set_unknown_method_callback(python_method);
        env.set_formatter(|out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value| {
            Ok(std::fmt::Write::write_str(out, &printed(value)?)?)
        });
        env.add_filter("string", |value: Value| printed(&value));
        env.add_filter(source::HELD, source::held);
        env.add_function("raise_exception", |reason: String| -> Rendered {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        let clock = Arc::<OnceLock<u64>>::default();
        let set = clock.clone();
        env.add_function("strftime_now", move |format: String| {
            let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
            python::strftime(set.get().copied().unwrap_or_else(now), &format)
        });
        env.add_filter("tojson", |value: Value, options: Kwargs| -> Rendered {
            let how = PythonJson {
                indent: options.get("indent")?,
                ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
                separators: options.get::<Option<Vec<String>>>("separators")?.and_then(|s| s.try_into().ok()),
                sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
            };
            options.assert_all_used()?;
            python_json(&value, how).map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e))
        });
        env.add_template_owned("chat", source::prepared(source)).map_err(failed)?;
        Ok(Self { env, special, clock })
    }

    /// The same template with its clock stopped so many seconds after 1970-01-01 (UTC), where it had none: prompts with
    /// the date in them are then the same every day.
    pub fn at(self, seconds: u64) -> Self {
        self.clock.get_or_init(|| seconds);
        self
    }

    /// The text of a conversation; `ask` appends the beginning of the model's next message.
    ///
    /// The text holds the special tokens already: tokenise it without adding more.
    ///
    /// # Errors
    /// [`Error::Template`]: the template refuses (its own words) or fails.
    pub fn render(&self, messages: &[Message], ask: bool) -> Result<String> {
        self.render_values(Value::from(Serde(messages)), ask, [])
    }

    /// The same for messages of any shape, with more variables, such as `tools`.
    fn render_values<'a>(
        &'a self,
        messages: Value,
        ask: bool,
        more: impl IntoIterator<Item = (&'a str, Value)>,
    ) -> Result<String> {
        let mut context: BTreeMap<&str, Value> =
            self.special.iter().map(|(k, v)| (k.as_str(), Value::from(v.as_str()))).collect();
        // Templates ask whether these are none: `transformers` defines them always.
        context.extend([("tools", Value::from(())), ("documents", Value::from(()))]);
        context.extend(more);
        context.insert("messages", messages);
        context.insert("add_generation_prompt", ask.into());
        self.env.get_template("chat").and_then(|t| t.render(context)).map_err(failed)
    }
}

fn printed(value: &Value) -> Rendered {
    python::text(value).map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
}

/// Python's methods of texts, lists and objects, those of `pycompat`; but `join` of a text, which would take what it
/// joins without fuel, is made here.
fn python_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    let (Some(between), "join", [values]) = (value.as_str(), method, args) else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args);
    };
    let mut joined = String::new();
    for (i, value) in values.try_iter()?.enumerate() {
        let part = printed(&value)?;
        let between = if i > 0 { between } else { "" };
        // One for 64 bytes, as minijinja counts, and one for the part.
        state.consume_fuel(1 + ((between.len() + part.len()) / 64) as u64)?;
        joined.push_str(between);
        joined.push_str(&part);
    }
    Ok(Value::from(joined))
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

/// Every `..._token` of a file, written as a text or as an object with `content`.
fn special_tokens(config: &serde_json::Value) -> BTreeMap<String, String> {
    let Some(fields) = config.as_object() else { return BTreeMap::new() };
    let text = |v: &serde_json::Value| v.as_str().or_else(|| v["content"].as_str()).map(str::to_owned);
    fields
        .iter()
        .filter(|(k, _)| k.ends_with("_token"))
        .filter_map(|(k, v)| Some((k.clone(), text(v)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Templates of ours, one for each construct that published ones use, and what transformers makes of them.
    #[test]
    fn golden_prompts() {
        #[derive(serde::Deserialize)]
        struct Golden {
            now: u64,
            special: BTreeMap<String, String>,
            cases: Vec<Case>,
        }
        #[derive(serde::Deserialize)]
        struct Case {
            template: String,
            messages: Value,
            #[serde(default)]
            tools: Value,
            #[serde(default)]
            variables: BTreeMap<String, Value>,
            add_generation_prompt: bool,
            text: Option<String>,
            refusal: Option<String>,
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/fixtures/chat_templates");
        let golden = std::fs::read_to_string(folder.join("cases.json")).unwrap();
        let golden: Golden = serde_json::from_str(&golden).unwrap();
        let special: Vec<_> = golden.special.into_iter().collect();
        let mut wrong = Vec::new();
        for case in &golden.cases {
            let name = &case.template;
            let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
            let template = match ChatTemplate::new(&source, special.clone()) {
                Ok(template) => template.at(golden.now),
                Err(e) => {
                    wrong.push(format!("{name}: {e}"));
                    continue;
                }
            };
            let tools = Some(("tools", case.tools.clone())).filter(|t| !t.1.is_undefined());
            let more = case.variables.iter().map(|(k, v)| (k.as_str(), v.clone())).chain(tools);
            let got = template.render_values(case.messages.clone(), case.add_generation_prompt, more);
            match (got, &case.text, &case.refusal) {
                (Ok(got), Some(want), _) if got == *want => {}
                (Err(e), _, Some(words)) if e.to_string().contains(words) => {}
                (got, want, refusal) => {
                    wrong.push(format!("{name}:\n got {got:?}\nwant {want:?} {refusal:?}"))
                }
            }
        }
        assert!(golden.cases.len() > 70);
        assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), golden.cases.len(), wrong.join("\n"));
    }

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
        );
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
    fn a_template_cannot_take_all_memory() {
        let many = |step: &str, then: &str| {
            format!(
                "{{% set ns = namespace(a='0123456789', b=[1, [2]]) %}}{{% for i in range(3000) %}}{step}{{% endfor %}}{then}"
            )
        };
        for source in [
            // Texts that double.
            many("{% set ns.a = ns.a ~ ns.a %}", ""),
            many("{% set ns.a = ns.a + ns.a %}", ""),
            many("{% set ns.a = ns.a * 2 %}", ""),
            many("{% set ns.a = ns.a.replace('0', ns.a) %}", ""),
            many("{% set ns.a = [ns.a, ns.a]|join %}", ""),
            many("{% set ns.a = ''.join([ns.a] * 1000) %}", ""),
            many("{% set ns.a = ns.a.join([ns.a, ns.a]) %}", ""),
            // Lists that hold one twice that holds another twice.
            many("{% set ns.b = [ns.b, ns.b] %}", "{{ ns.b }}"),
            many("{% set ns.b = [ns.b, ns.b] %}", "{{ ns.b|string }}"),
            many("{% set ns.b = [ns.b, ns.b] %}", "{{ ns.b|tojson }}"),
            many("{% set ns.b = [ns.b, ns.b] %}", "{{ {'a': ns.b}|tojson(sort_keys=true) }}"),
            many("{% set ns.b = [ns.b, ns.b] %}", "{{ 'x'.join([ns.b]) }}"),
            // As deep as they are many.
            many("{% set ns.b = [ns.b] %}", "{{ ns.b }}"),
            many("{% set ns.b = [ns.b] %}", "{{ ns.b|tojson }}"),
            many("{% set ns.b = {'a': ns.b} %}", "{{ ns.b }}"),
            many("{% set ns.b = {'a': ns.b} %}", "{{ ns.b|tojson(sort_keys=true) }}"),
            // One that holds itself.
            many("", "{% set ns.a = ns %}{{ ns }}"),
            many("", "{% set ns.a = ns %}{{ ns|tojson }}"),
            many("", "{% set ns.a = {'b': [ns]} %}{{ 'x' ~ ns }}"),
            many("", "{% set other = namespace(a=ns) %}{% set ns.a = other %}{{ 'x' ~ ns }}"),
            many("", "{{ [[1]]|tojson(indent=99999999999999) }}"),
            many("", "{{ [[1]]|tojson(indent=70000) * 9999 }}"),
        ] {
            let e = render(&source, &[]).unwrap_err().to_string();
            assert!(
                e.len() < 1000
                    && ["does not end", "too large", "a namespace"].iter().any(|part| e.contains(part)),
                "{source}: {e:.1000}"
            );
        }
    }

    #[test]
    fn templates_are_found_where_models_keep_them() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        let found = || ChatTemplate::find(dir.path()).unwrap().map(|t| t.render(&[], false).unwrap());
        assert_eq!(found(), None);
        put("tokenizer_config.json", r#"{"bos_token": {"content": "<b>"}, "eos_token": "<e>"}"#);
        assert_eq!(found(), None);
        put("chat_template.json", r#"{"chat_template": "{{ eos_token }}{{ pad_token }}0"}"#);
        put("special_tokens_map.json", r#"{"pad_token": "<p>", "eos_token": "<other>"}"#);
        assert_eq!(found().unwrap(), "<e><p>0");
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
