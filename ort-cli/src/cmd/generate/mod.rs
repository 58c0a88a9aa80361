//! `ort generate`: text from a model folder, within a memory limit.

mod arguments;
mod chat;
mod planning;
mod prompts;
mod report;

use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::Result;
use ort_runtime::generate::{Decoder, EndReason, Generator};
use ort_runtime::text::{TextCodec, TextStream};

pub(crate) use arguments::GenerateArgs;
pub(crate) use planning::{PlanRequest, Requests, plan_folder};

use crate::output::{print, say, say_json};
use report::{Answer, GenerationReport};

pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode> {
    let folder = args.open_folder()?;
    if args.dry_run {
        return args.dry_run(&folder);
    }
    let text = TextCodec::open(&folder)?;
    // Before loading: a command line without a prompt is wrong at once.
    let prompts = if args.is_chat() { Vec::new() } else { args.prompts(&text)? };
    let decoder = Decoder::open(&folder, &args.decoder_options())?;
    let mut generator = Generator::with_options(decoder, args.scheduler_options());
    if args.is_chat() {
        return chat::run(args, &text, &mut generator);
    }
    answer(args, &text, &mut generator, &prompts)
}

/// Answers all prompts at once. A single answer is printed as it arrives.
fn answer(
    args: &GenerateArgs,
    text: &TextCodec,
    generator: &mut Generator,
    prompts: &[Vec<u32>],
) -> Result<ExitCode> {
    let stops = args.stops();
    let mut streams: Vec<TextStream<'_>> = prompts.iter().map(|_| TextStream::new(text, stops)).collect();
    let mut texts = vec![String::new(); prompts.len()];
    let mut unprinted = None;
    let is_streamed = prompts.len() == 1 && !args.json;
    let answers = generator.generate(prompts, &args.options(), &mut |index, token| {
        let Some((stream, text)) = streams.get_mut(index).zip(texts.get_mut(index)) else {
            return Ok(ControlFlow::Break(()));
        };
        let piece = stream.push(token)?;
        if is_streamed {
            unprinted = print(format_args!("{piece}")).err();
        }
        text.push_str(&piece);
        let ends = stream.is_stopped() || unprinted.is_some();
        Ok(if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    if let Some(problem) = unprinted {
        return Err(problem);
    }
    let mut report = GenerationReport::new(generator);
    for (((stream, mut text), generated), prompt) in streams.into_iter().zip(texts).zip(answers).zip(prompts)
    {
        let rest = stream.finish();
        if is_streamed {
            print(format_args!("{rest}\n"))?;
        }
        text.push_str(&rest);
        let reason = match generated.reason {
            EndReason::EndToken => "end_token",
            EndReason::MaxTokens => "max_tokens",
            EndReason::Stopped => "stop_string",
        };
        report.answers.push(Answer { text, prompt_tokens: prompt.len(), tokens: generated.tokens, reason });
    }
    if args.json {
        say_json(&report)?;
    } else {
        if !is_streamed {
            for (index, answer) in report.answers.iter().enumerate() {
                say!("[{}] {}", index + 1, answer.text)?;
            }
        }
        report.note();
    }
    Ok(ExitCode::SUCCESS)
}
