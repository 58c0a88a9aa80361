//! `ort generate --chat` without a prompt: a conversation on standard input.

use std::io::{BufRead, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use ort_runtime::generate::{GenerateOptions, Generator};
use ort_runtime::text::{Message, TextCodec, TextStream};

use super::arguments::GenerateArgs;
use super::prompts::{MOST_PROMPT_BYTES, is_interactive, message};
use super::report::GenerationReport;
use crate::output::print;

/// Answers each line, with all that was said before it.
pub(super) fn run(args: &GenerateArgs, text: &TextCodec, generator: &mut Generator) -> Result<ExitCode> {
    let mut messages: Vec<Message> = args.system.iter().map(|text| message("system", text)).collect();
    // Fails before the first question if there is no template.
    text.encode_chat(&[message("user", "")])?;
    let options = GenerateOptions { context: Some(context(args, generator)?), ..args.options() };
    let mut input = std::io::Read::take(std::io::stdin().lock(), MOST_PROMPT_BYTES);
    let mut line = String::new();
    loop {
        if is_interactive() {
            // A prompt sign that cannot be written is no failure.
            let _ = write!(std::io::stderr(), "> ").and_then(|()| std::io::stderr().flush());
        }
        line.clear();
        if input.read_line(&mut line).context("reading standard input")? == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        if line.trim().is_empty() {
            continue;
        }
        messages.push(message("user", line.trim()));
        let prompt = text.encode_chat(&messages)?;
        let mut stream = TextStream::new(text, args.stops());
        let (mut answer, mut unprinted) = (String::new(), None);
        generator.generate(&[prompt], &options, &mut |_, token| {
            let piece = stream.push(token)?;
            unprinted = print(format_args!("{piece}")).err();
            answer.push_str(&piece);
            let ends = stream.is_stopped() || unprinted.is_some();
            Ok(if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if let Some(problem) = unprinted {
            return Err(problem);
        }
        let rest = stream.finish();
        print(format_args!("{rest}\n"))?;
        answer.push_str(&rest);
        messages.push(message("assistant", &answer));
        GenerationReport::new(generator).note();
    }
}

/// The context of the conversation: what was asked for, or the longest that fits.
fn context(args: &GenerateArgs, generator: &Generator) -> Result<usize> {
    if let Some(context) = args.context {
        return Ok(context);
    }
    let decoder = generator.decoder();
    let Some(longest) = decoder.longest_context() else {
        bail!("the configuration has no context length; give --context N");
    };
    let plan = decoder.plan(longest, 1)?;
    let context = if plan.fits() { longest } else { plan.largest.unwrap_or(longest) };
    if context < longest {
        tracing::warn!("the memory allows a conversation of {context} tokens, of the model's {longest}");
    }
    Ok(context)
}
