//! The flags of `ort generate`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use ort_runtime::generate::{DecoderOptions, GenerateOptions, ModelFolder, Sampling, SchedulerOptions};
use ort_runtime::text::{Message, TextCodec};

use super::planning::{PlanRequest, Requests, plan_folder};
use super::prompts::{is_interactive, message, read_prompt};
use crate::args::{size, threads};
use crate::numbers::{above_zero, from_zero, whole};
use crate::usage::wrong_usage;

/// Generates text with a decoder of a folder: one of onnxruntime-genai, optimum or Transformers.js.
#[derive(Args)]
pub(crate) struct GenerateArgs {
    /// The folder with genai_config.json, or with config.json and model.onnx, and tokenizer.json.
    pub(super) folder: PathBuf,
    /// Continue this text (repeatable: the prompts run together).
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Continue the text of this file; - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompt_file: Option<PathBuf>,
    /// Continue each line of this file, many at once; - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file"])]
    prompts: Option<PathBuf>,
    /// Run at most N prompts at once, and let the others wait [default: as many as the memory limit
    /// allows].
    #[arg(long, value_name = "N", value_parser = crate::numbers::positive::<std::num::NonZeroUsize>)]
    requests: Option<std::num::NonZeroUsize>,
    /// Chat: put prompts into the model's chat template. Without a prompt, answer the lines of
    /// standard input, as a conversation.
    #[arg(long)]
    chat: bool,
    /// With --chat: the system message.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub(super) system: Option<String>,
    /// The most tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize>)]
    pub(super) max_tokens: usize,
    /// Tokens of prompt and answer to plan memory for [default: what the prompt and --max-tokens
    /// need; in a chat, as many as the model has and the memory limit allows].
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    pub(super) context: Option<usize>,
    /// Divide the logits by this; 0 takes the most likely token each time [default: 0, or 1 if
    /// another sampling flag is given].
    #[arg(long, value_name = "T", value_parser = from_zero::<f32>)]
    temperature: Option<f32>,
    /// Sample from the N most likely tokens.
    #[arg(long, value_name = "N", value_parser = whole::<usize>)]
    top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities sum to P.
    #[arg(long, value_name = "P", value_parser = above_zero::<f32>)]
    top_p: Option<f32>,
    /// Sample from tokens that are at least P times as likely as the most likely one.
    #[arg(long, value_name = "P", value_parser = from_zero::<f32>)]
    min_p: Option<f32>,
    /// Make earlier tokens less likely: 1 changes nothing, 1.1 is usual.
    #[arg(long, value_name = "X", value_parser = above_zero::<f32>)]
    repetition_penalty: Option<f32>,
    /// Seed of the random choices.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    seed: u64,
    /// End the answer before this text (repeatable).
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Go on after the token that ends a text.
    #[arg(long)]
    ignore_end: bool,
    /// Hard limit on what is allocated: packed weights, caches, prefill, logits and the sampler.
    /// Weights mapped from the file do not count. Bytes, or a number with KiB, MiB, GiB, KB, MB or
    /// GB.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) memory_limit: Option<usize>,
    /// Tokens of a prompt that one run takes [default: up to 512, as the memory limit allows].
    #[arg(long, value_name = "N", value_parser = crate::numbers::positive::<std::num::NonZeroUsize>)]
    prefill_chunk: Option<std::num::NonZeroUsize>,
    /// Print the memory and the longest context that fits, and generate nothing.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Intra-op threads: threads inside one operator [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Keep packed weights in mapped files of this folder.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// The model file in the folder, if it has several: onnx/model_q4.onnx.
    #[arg(long, value_name = "FILE")]
    model_file: Option<PathBuf>,
    /// Print one JSON object: answers, tokens, times and memory.
    #[arg(long, conflicts_with = "dry_run")]
    pub(super) json: bool,
}

impl GenerateArgs {
    pub(super) fn open_folder(&self) -> Result<ModelFolder> {
        Ok(ModelFolder::open(&self.folder, self.model_file.as_deref())?)
    }

    pub(super) fn decoder_options(&self) -> DecoderOptions {
        DecoderOptions {
            memory_limit: self.memory_limit,
            threads: self.threads,
            prefill_chunk: self.prefill_chunk.map(std::num::NonZeroUsize::get),
            cache: self.cache.clone(),
        }
    }

    pub(super) fn scheduler_options(&self) -> SchedulerOptions {
        SchedulerOptions {
            max_requests: self.requests.map(std::num::NonZeroUsize::get),
            ..SchedulerOptions::default()
        }
    }

    /// Whether there are prompts on the command line.
    fn has_prompts(&self) -> bool {
        !self.prompt.is_empty() || self.prompt_file.is_some() || self.prompts.is_some()
    }

    /// Whether standard input is a conversation.
    pub(super) fn is_chat(&self) -> bool {
        self.chat && !self.has_prompts()
    }

    pub(super) fn stops(&self) -> &[String] {
        &self.stop
    }

    pub(super) fn options(&self) -> GenerateOptions {
        let samples = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        let standard = Sampling::default();
        GenerateOptions {
            max_tokens: self.max_tokens,
            sampling: Sampling {
                temperature: self.temperature.unwrap_or(if samples { 1.0 } else { 0.0 }),
                top_k: self.top_k.unwrap_or(standard.top_k),
                top_p: self.top_p.unwrap_or(standard.top_p),
                min_p: self.min_p.unwrap_or(standard.min_p),
                repetition_penalty: self.repetition_penalty.unwrap_or(standard.repetition_penalty),
            },
            seed: self.seed,
            ignore_end: self.ignore_end,
            context: self.context,
        }
    }

    /// The tokens of all prompts.
    pub(super) fn prompts(&self, text: &TextCodec) -> Result<Vec<Vec<u32>>> {
        let mut prompts = self.prompt.clone();
        match (&self.prompt_file, &self.prompts) {
            (Some(path), _) => prompts.push(read_prompt(path)?),
            (_, Some(path)) => {
                let lines = read_prompt(path)?;
                prompts.extend(lines.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned));
                if prompts.is_empty() {
                    wrong_usage!("'{}' has no prompts; give one in each line", path.display());
                }
            }
            _ if prompts.is_empty() && is_interactive() => {
                wrong_usage!("there is no prompt; give --prompt TEXT, --prompt-file FILE or --chat")
            }
            _ if prompts.is_empty() => prompts.push(read_prompt("-".as_ref())?),
            _ => {}
        }
        let encode = |prompt: &String| -> Result<Vec<u32>> {
            if self.chat {
                return Ok(text.encode_chat(&self.messages(prompt))?);
            }
            Ok(text.encode(prompt, true)?)
        };
        prompts.iter().map(encode).collect()
    }

    fn messages(&self, prompt: &str) -> Vec<Message> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain([message("user", prompt)]).collect()
    }

    /// Prints the memory of what was asked for.
    pub(super) fn dry_run(&self, folder: &ModelFolder) -> Result<ExitCode> {
        let mut context = self.context;
        let mut requests = Requests::Exactly(self.requests.map_or(1, std::num::NonZeroUsize::get));
        if self.has_prompts() {
            let prompts = self.prompts(&TextCodec::open(folder)?)?;
            let most = self.requests.map_or(prompts.len(), |most| most.get().min(prompts.len()));
            requests = Requests::UpTo(most);
            let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
            let needed = longest.saturating_add(self.max_tokens.saturating_sub(1)).max(1);
            context = context.or(Some(needed));
        }
        let request = PlanRequest { context, requests, json: false };
        plan_folder(folder, &self.decoder_options(), &request)
    }
}
