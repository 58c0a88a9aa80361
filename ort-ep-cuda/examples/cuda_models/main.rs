//! Times a model on a CUDA device, runs it in many shapes within a limit of device memory, or holds
//! it against the CPU. `cargo xtask gpu` packs it.
//!
//!     cuda_models times MODEL [NAME=SIZE]... [--seconds S] [--option NAME=VALUE]...
//!     cuda_models shapes MODEL NAME=LOW..HIGH... [--runs N] [--option gpu_mem_limit=BYTES]
//! [--wait]     cuda_models runs MODEL [NAME=VALUE,VALUE...]... [--runs N] [--tolerance T]
//! [--only-shapes-on-host]
//!
//! `NAME` is a symbolic size of the model's inputs, 1 where it is not given. Options are the
//! provider's. What is found is one JSON object on the last line of the output.
//!
//! `times` has inputs and outputs stay on the device, and waits for it once for each sample of
//! several runs: what is timed is the device, or the host where that is slower, without copies
//! between the two. `shapes` runs from the host to the host, in shapes drawn at random; a run that
//! the limit has no room for is counted, and the next one goes on. With `--wait` it waits for a
//! line on its standard input once the device is open, so that whoever starts it can ask the driver
//! what is free before anything is allocated. `runs` has the next of the values in each run, as
//! `ort_testkit::made_up` reads them, and prints a line in words.

mod runs;
mod shapes;
mod times;

use std::sync::Arc;

use ort_core::ep::{Device, ProviderOptions, provider};
use ort_core::session::{Model, Session};
use ort_core::{Result, error};
use ort_ep_cpu as _;
use ort_ep_cuda::CudaDevice;

/// What the command line says.
struct Arguments {
    model: String,
    /// Sizes by name, as they are written.
    sizes: Vec<(String, String)>,
    options: ProviderOptions,
    seconds: f64,
    runs: usize,
    is_waiting: bool,
    tolerance: f64,
    only_shapes_on_host: bool,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments> {
        let missing = |what: &str| error!(InvalidArgument, "{what} is missing");
        let pair = |word: String| match word.split_once('=') {
            Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
            None => Err(error!(InvalidArgument, "'{word}' is not NAME=VALUE")),
        };
        let mut parsed = Arguments {
            model: String::new(),
            sizes: Vec::new(),
            options: ProviderOptions::new(),
            seconds: 1.0,
            runs: 1000,
            is_waiting: false,
            tolerance: 1e-3,
            only_shapes_on_host: false,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| missing(&format!("the value of {word}")));
            match word.as_str() {
                "--seconds" => parsed.seconds = number(&value()?)?,
                "--runs" => parsed.runs = number(&value()?)?,
                "--tolerance" => parsed.tolerance = number(&value()?)?,
                "--only-shapes-on-host" => parsed.only_shapes_on_host = true,
                "--wait" => parsed.is_waiting = true,
                "--option" => parsed.options.extend([pair(value()?)?]),
                _ if parsed.model.is_empty() && !word.contains('=') => parsed.model = word,
                _ => parsed.sizes.push(pair(word)?),
            }
        }
        if parsed.model.is_empty() { Err(missing("the model")) } else { Ok(parsed) }
    }

    /// The device with the options.
    fn open(&self) -> Result<Arc<CudaDevice>> {
        CudaDevice::open(0, &self.options)
    }

    /// A session on the device, with the CPU for the rest.
    fn session(&self, model: &Model, device: &Arc<CudaDevice>) -> Result<Session> {
        let host = provider("cpu")?.open(0, &ProviderOptions::new())?;
        Session::builder(model).device(device.clone() as Arc<dyn Device>).device(host).build()
    }
}

const USAGE: &str = "cuda_models times MODEL [NAME=SIZE]... [--seconds S] [--option NAME=VALUE]..., or \
    cuda_models shapes MODEL NAME=LOW..HIGH... [--runs N] [--option NAME=VALUE]... [--wait], or \
    cuda_models runs MODEL [NAME=VALUE,VALUE...]... [--runs N] [--tolerance T] [--only-shapes-on-host]";

fn number<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| error!(InvalidArgument, "'{text}' is no number"))
}

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let command = words.next().unwrap_or_default();
    match command.as_str() {
        "times" => times::run(&Arguments::parse(words)?),
        "shapes" => shapes::run(&Arguments::parse(words)?),
        "runs" => runs::run(&Arguments::parse(words)?),
        _ => Err(error!(InvalidArgument, "'{command}' is not 'times', 'shapes' or 'runs': {USAGE}")),
    }
}
