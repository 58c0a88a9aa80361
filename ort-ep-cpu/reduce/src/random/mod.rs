//! Random number generation.
//!
//! A node with a seed draws the same numbers in every run. It uses the Mersenne Twister and the
//! methods of NumPy's legacy generator, like the standard's reference. Without a seed, each run
//! starts from the process's sequence of seeds, or from the system's entropy.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::TensorMut;
use ort_core::{Result, ensure, error, for_each_type, random};
use rand_mt::Mt;

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, elements};
use ort_cpu_kernel::number::Number;
use ort_cpu_kernel::number::to_f64s;
use ort_cpu_threads::interrupt::{Pace, pieces, spending};

cpu_kernels![
    KernelDef { op: "RandomNormal", make: make_normal, ..KernelDef::BASE },
    KernelDef { op: "RandomNormalLike", make: make_normal, ..KernelDef::BASE },
    KernelDef { op: "RandomUniform", make: make_uniform, ..KernelDef::BASE },
    KernelDef { op: "RandomUniformLike", make: make_uniform, ..KernelDef::BASE },
    KernelDef { op: "Bernoulli", make: make_bernoulli, ..KernelDef::BASE },
    KernelDef { op: "Multinomial", make: make_multinomial, ..KernelDef::BASE },
];

/// The seed of a node's random numbers.
#[derive(Clone, Copy)]
struct Seed(Option<f32>);

impl Seed {
    fn of(cx: &CompileCx<'_>) -> Seed {
        Seed(cx.attrs().find_float("seed").filter(|seed| !seed.is_nan()))
    }

    fn generator(self) -> Generator {
        let seed = match self.0 {
            Some(seed) => seed as i64 as u32,
            None => random::next_seed(),
        };
        Generator { words: Mt::new(seed), spare: None }
    }
}

/// NumPy's legacy generator.
struct Generator {
    words: Mt,
    spare: Option<f64>,
}

impl Generator {
    /// Returns a number from 0 to below 1 with 53 random bits.
    fn unit(&mut self) -> f64 {
        let (high, low) = (self.words.next_u32() >> 5, self.words.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// Draws from the standard normal distribution, by G. Marsaglia's polar method.
    fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let (x, y) = (2.0 * self.unit() - 1.0, 2.0 * self.unit() - 1.0);
            let square = x * x + y * y;
            if square < 1.0 && square != 0.0 {
                let factor = (-2.0 * square.ln() / square).sqrt();
                self.spare = Some(factor * x);
                return factor * y;
            }
        }
    }

    /// Returns true with probability `p`, by inversion of the binomial distribution of one trial.
    fn chance(&mut self, p: f64) -> bool {
        if p <= 0.0 {
            return false;
        }
        // NumPy's method draws the rarer outcome.
        let (rare, complement) = if p <= 0.5 { (p, false) } else { (1.0 - p, true) };
        if rare <= 0.0 {
            return complement;
        }
        let unlikely = self.unit() > 1.0 - rare;
        unlikely != complement
    }
}

fn fill(output: TensorMut<'_>, mut draw: impl FnMut() -> f64) -> Result<()> {
    let dtype = output.dtype();
    let pace = Pace::default();
    let mut draw = || {
        pace.step(2);
        draw()
    };
    if dtype == DType::Bool {
        output.bytes_mut()?.fill_with(|| u8::from(draw() != 0.0));
        return Ok(());
    }
    for_each_type!(dtype in NUMERIC, T => {
        output.as_mut_slice::<T>()?.fill_with(|| T::from_f64(draw()));
        Ok(())
    }, else => Err(error!(NotImplemented, "random numbers of type {} are not supported", dtype.name())))
}

fn make_normal(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (mean, scale) = (f64::from(cx.attrs().float("mean")?), f64::from(cx.attrs().float("scale")?));
    let seed = Seed::of(cx);
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let mut generator = seed.generator();
        fill(cx.output(0)?, || generator.normal() * scale + mean)
    }))
}

fn make_uniform(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (low, high) = (f64::from(cx.attrs().float("low")?), f64::from(cx.attrs().float("high")?));
    let seed = Seed::of(cx);
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let mut generator = seed.generator();
        fill(cx.output(0)?, || generator.unit() * (high - low) + low)
    }))
}

fn make_bernoulli(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let seed = Seed::of(cx);
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(0)).saturating_mul(size_of::<f64>());
    let run = move |cx: &mut RunCx<'_>| {
        let mut generator = seed.generator();
        let mut chances = to_f64s(&cx.input(0)?)?.into_iter();
        fill(cx.output(0)?, || f64::from(u8::from(generator.chance(chances.next().unwrap_or(0.0)))))
    };
    Ok(Box::new(WithHeap { bound, run }))
}

fn make_multinomial(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let seed = Seed::of(cx);
    // The logits as `f64`, and their cumulative sums.
    let bound = |shapes: &IoShapes<'_>| elements(shapes.input(0)).saturating_mul(2 * size_of::<f64>());
    let run = move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let (logits, output) = (to_f64s(&input)?, cx.output(0)?);
        let (&[_, classes], &[_, samples]) = (input.shape(), output.shape()) else {
            return Err(error!(InvalidArgument, "log-probabilities of shape {:?}", input.shape()));
        };
        ensure!(classes > 0 || output.element_count() == 0, InvalidArgument, "there is no class to draw");
        // For each row, the cumulative sums of the unnormalized class probabilities.
        let mut sums = Vec::with_capacity(logits.len());
        for row in logits.chunks_exact(classes.max(1)) {
            let greatest = pieces(row).flatten().copied().fold(f64::NEG_INFINITY, f64::max);
            sums.extend(spending(4, row).scan(0.0, |sum, logit| {
                *sum += (logit - greatest).exp();
                Some(*sum)
            }));
        }
        let (mut generator, mut drawn) = (seed.generator(), 0..);
        fill(output, || {
            let row = drawn.next().unwrap_or(0) / samples.max(1);
            let row = sums.get(row * classes..(row + 1) * classes).unwrap_or(&[]);
            let target = generator.unit() * row.last().copied().unwrap_or(0.0);
            row.partition_point(|&sum| sum <= target).min(classes.saturating_sub(1)) as f64
        })
    };
    Ok(Box::new(WithHeap { bound, run }))
}
