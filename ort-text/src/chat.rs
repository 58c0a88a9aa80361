//! Chat templates: Jinja templates that turn messages into one prompt, as in transformers.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, UndefinedBehavior, context};
use ort_core::{Error, Result, Within, error};
use ort_generate::ModelFolder;
use serde::Serialize;

/// What a template may execute: a hundred messages take some ten thousand steps.
const FUEL: u64 = 5_000_000;

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// A chat template with the special tokens that it may write.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    ///
    /// The template is not valid.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<ChatTemplate> {
        let mut environment = Environment::new();
        // As in transformers.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|problem| explained(&problem))?);
        environment.set_undefined_behavior(UndefinedBehavior::Chainable);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |text: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, text))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, seconds_now()));
        environment.add_filter("tojson", to_json);
        environment.add_template_owned("chat", source.to_owned()).map_err(|problem| explained(&problem))?;
        Ok(ChatTemplate { environment, bos_token: bos_token.to_owned(), eos_token: eos_token.to_owned() })
    }

    /// Finds the template of a model folder, if it has one.
    pub(crate) fn of_folder(folder: &ModelFolder) -> Result<Option<ChatTemplate>> {
        let settings = folder.read_json("tokenizer_config.json")?.unwrap_or_default();
        let alone = folder.read("chat_template.jinja")?;
        let Some(source) = alone.or_else(|| named_template(settings.get("chat_template"))) else {
            return Ok(None);
        };
        let token = |name: &str| {
            let token = settings.get(name);
            let text = token.and_then(|token| token.as_str().or_else(|| token.get("content")?.as_str()));
            text.unwrap_or_default().to_owned()
        };
        let template = ChatTemplate::new(&source, &token("bos_token"), &token("eos_token"));
        template.within(|| format!("the chat template of '{}'", folder.folder.display())).map(Some)
    }

    /// Renders a conversation, up to the begin of the next answer.
    ///
    /// # Errors
    ///
    /// The template refuses the messages, or does too much.
    pub fn render(&self, messages: &[Message]) -> Result<String> {
        let values = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => true,
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
        };
        let template = self.environment.get_template("chat").map_err(|problem| explained(&problem))?;
        template.render(values).map_err(|problem| explained(&problem))
    }
}

/// A template that is a text, or the default one of a list.
fn named_template(value: Option<&serde_json::Value>) -> Option<String> {
    let value = value?;
    if let Some(text) = value.as_str() {
        return Some(text.to_owned());
    }
    let all = value.as_array()?;
    let default =
        all.iter().find(|entry| entry.get("name").and_then(|name| name.as_str()) == Some("default"));
    default.or(all.first())?.get("template")?.as_str().map(str::to_owned)
}

fn explained(problem: &minijinja::Error) -> Error {
    let line = problem.line().map(|line| format!(" in line {line}")).unwrap_or_default();
    error!(InvalidArgument, "the chat template fails{line}: {problem}")
        .help("check the roles and their order; some templates take no system message")
}

/// `tojson` as in transformers: no escapes for HTML, and Python's separators.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Other options change spacing that no template of a model depends on.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut text = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(16));
            let pretty = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut text, PythonFormatter)),
    };
    let failed = |text: String| minijinja::Error::new(ErrorKind::BadSerialization, text);
    written.map_err(|problem| failed(problem.to_string()))?;
    String::from_utf8(text).map(Value::from).map_err(|problem| failed(problem.to_string()))
}

/// The separators `, ` and `: `.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

fn seconds_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The conversions of `strftime` that templates use for today's date, in UTC.
fn strftime(format: &str, seconds: u64) -> String {
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
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Civil date of a day count: eras of 400 years that begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        match characters.next() {
            Some('Y') => text.push_str(&year.to_string()),
            Some('m') => text.push_str(&format!("{month:02}")),
            Some('d') => text.push_str(&format!("{day:02}")),
            Some('B') => text.push_str(name),
            Some('b') => text.extend(name.chars().take(3)),
            Some('H') => text.push_str(&format!("{:02}", time / 3600)),
            Some('M') => text.push_str(&format!("{:02}", time / 60 % 60)),
            Some('S') => text.push_str(&format!("{:02}", time % 60)),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_python() {
        // time.strftime("%d %b %Y, %B %m %H:%M:%S", time.gmtime(seconds))
        for (seconds, expected) in [
            (0, "01 Jan 1970, January 01 00:00:00"),
            (951_827_696, "29 Feb 2000, February 02 12:34:56"),
            (1_709_251_199, "29 Feb 2024, February 02 23:59:59"),
            (4_107_542_400, "01 Mar 2100, March 03 00:00:00"),
        ] {
            assert_eq!(strftime("%d %b %Y, %B %m %H:%M:%S", seconds), expected);
        }
    }

    #[test]
    fn templates_that_fail_say_why() {
        let user = [Message { role: "user".to_owned(), content: "Hi".to_owned() }];
        for (template, expected) in [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            (
                "{% for x in range(100000) %}{% for y in range(100000) %}{{ y }}{% endfor %}{% endfor %}",
                "fuel",
            ),
            ("{{ messages[0].content.nothing() }}", "nothing"),
        ] {
            let problem = ChatTemplate::new(template, "", "").and_then(|chat| chat.render(&user));
            let text = problem.unwrap_or_else(|problem| problem.to_string());
            assert!(text.contains(expected), "{template}: {text}");
        }
        let problem = ChatTemplate::new("{% if %}", "", "").err().map(|problem| problem.to_string());
        assert!(problem.is_some_and(|text| text.contains("line 1")));
    }
}
