//! `ImageDecoder`: BMP, JPEG, JPEG 2000, PNG, PNM, TIFF and WebP, detected by content.
//!
//! JPEG is decoded by `jpeg`, all other formats by crates. Memory is reserved before anything is
//! decoded, so the header alone gets an oversized image rejected. An image that cannot be decoded
//! is an error, not an empty result.
//!
//! The JPEG standard leaves the rounding of the inverse DCT and chroma upsampling to the decoder.
//! The pixels here match libjpeg-turbo, which the ONNX reference uses.

use std::io::{self, BufRead, Cursor, Read, Seek, SeekFrom};

use hayro_jpeg2000::{DecodeSettings, DecoderContext, Image};
use image::{ImageDecoder, ImageReader, Limits};
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::tensor::Value;
use ort_core::{Error, Result, ensure, error};

use super::jpeg::{self, Frame, Room};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::{spend, spending};

cpu_kernels![KernelDef {
    op: "ImageDecoder",
    outputs: OutputsFrom::Kernel,
    make: make_decoder,
    ..KernelDef::BASE
}];

/// Maximum pixels of an image, and maximum bytes that a decoder may hold besides the output.
const MOST_PIXELS: u64 = 1 << 27;
const MOST_BYTES: u64 = 1 << 29;
/// Bytes per sample in the JPEG 2000 decoder: `f32` coefficients, `f32` samples, and the result.
const BYTES_PER_WAVELET_SAMPLE: u64 = 12;

/// The signatures of JPEG 2000, in its container and as a raw codestream.
const JPEG_2000: [&[u8]; 2] = [b"\x00\x00\x00\x0CjP  ", b"\xFF\x4F\xFF\x51"];

/// The signature of a JPEG file.
const JPEG: &[u8] = b"\xFF\xD8\xFF";

/// The signature of a PNG file.
const PNG: &[u8] = b"\x89PNG\r\n\x1A\n";

/// The channels of an output pixel.
#[derive(Clone, Copy)]
enum PixelFormat {
    Rgb,
    Bgr,
    Grayscale,
}

impl PixelFormat {
    fn channels(self) -> usize {
        match self {
            PixelFormat::Rgb | PixelFormat::Bgr => 3,
            PixelFormat::Grayscale => 1,
        }
    }

    fn write(self, [red, green, blue]: [u8; 3], pixel: &mut [u8]) {
        match self {
            PixelFormat::Rgb => pixel.copy_from_slice(&[red, green, blue]),
            PixelFormat::Bgr => pixel.copy_from_slice(&[blue, green, red]),
            PixelFormat::Grayscale => pixel.fill(luma([red, green, blue])),
        }
    }
}

/// Returns the BT.601 luma with 16-bit weights, as the standard's reference computes it.
fn luma([red, green, blue]: [u8; 3]) -> u8 {
    let sum = 19_595 * u32::from(red) + 38_470 * u32::from(green) + 7_471 * u32::from(blue) + 0x8000;
    (sum >> 16) as u8
}

/// What the header says, before any pixel is decoded.
struct Layout {
    height: usize,
    width: usize,
    /// Channels per pixel: grey or colour, perhaps followed by alpha, which is dropped.
    channels: usize,
    /// Bytes per channel: 1 or 2 for integers, 4 for `f32`.
    sample: usize,
}

impl Layout {
    fn new([width, height]: [u32; 2], channels: usize, sample: usize) -> Result<Layout> {
        // Two factors of 32 bits fit 64.
        let pixels = u64::from(width) * u64::from(height);
        ensure!(
            pixels <= MOST_PIXELS,
            InvalidArgument,
            "an image of {width} by {height} pixels; images of up to {MOST_PIXELS} pixels are decoded"
        );
        ensure!((1..=4).contains(&channels), InvalidArgument, "an image of {channels} channels");
        Ok(Layout { height: height as usize, width: width as usize, channels, sample })
    }

    fn bytes(&self) -> usize {
        self.height * self.width * self.channels * self.sample
    }

    /// Converts decoded pixels to the output format.
    fn convert(&self, decoded: &[u8], format: PixelFormat, output: &mut [u8]) {
        let pixels = decoded.chunks_exact(self.channels * self.sample);
        for (from, to) in spending(2, pixels.zip(output.chunks_exact_mut(format.channels()))) {
            let channel = |index: usize| self.byte(from, index);
            let colour =
                // One or two channels are grey, without or with alpha.
                if self.channels < 3 { [channel(0); 3] } else { [channel(0), channel(1), channel(2)] };
            format.write(colour, to);
        }
    }

    /// Returns a channel as 8 bits.
    fn byte(&self, pixel: &[u8], index: usize) -> u8 {
        match pixel.get(index * self.sample..(index + 1) * self.sample) {
            Some(&[byte]) => byte,
            // Rounds 16 bits to nearest: 65535 / 257 = 255.
            Some(&[a, b]) => ((u32::from(u16::from_ne_bytes([a, b])) + 128) / 257) as u8,
            Some(&[a, b, c, d]) => (f32::from_ne_bytes([a, b, c, d]).clamp(0.0, 1.0) * 255.0).round() as u8,
            _ => 0,
        }
    }
}

fn make_decoder(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let format = match cx.attrs().string("pixel_format")? {
        "RGB" => PixelFormat::Rgb,
        "BGR" => PixelFormat::Bgr,
        "Grayscale" => PixelFormat::Grayscale,
        other => return Err(error!(InvalidGraph, "pixel_format '{other}' is not known")),
    };
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let encoded = cx.input(0)?.bytes()?;
        if JPEG_2000.iter().any(|start| encoded.starts_with(start)) {
            decode_wavelets(cx, encoded, format)
        } else if encoded.starts_with(JPEG) {
            decode_jpeg(cx, encoded, format)
        } else if encoded.starts_with(PNG) {
            decode_png(cx, encoded, format)
        } else {
            decode_common(cx, encoded, format)
        }
    }))
}

fn damaged(problem: &dyn std::fmt::Display) -> Error {
    error!(
        InvalidArgument,
        "cannot decode the image: {problem}; BMP, JPEG, JPEG 2000, PNG, PNM, TIFF and WebP can be decoded"
    )
}

/// A reader of an encoded image that counts the bytes read as work, so that a deadline can stop the
/// decoder.
struct Watched<'a>(Cursor<&'a [u8]>);

impl<'a> Watched<'a> {
    /// Maximum bytes per read, because they may unpack to a thousand times their size.
    const PIECE: usize = 1 << 10;
    /// Work units per byte: a byte of a compressed image stands for many pixels.
    const UNITS_OF_A_BYTE: usize = 64;

    fn new(encoded: &'a [u8]) -> Watched<'a> {
        Watched(Cursor::new(encoded))
    }
}

impl Read for Watched<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let piece = to.len().min(Self::PIECE);
        spend(piece * Self::UNITS_OF_A_BYTE);
        self.0.read(&mut to[..piece])
    }
}

impl BufRead for Watched<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let rest = self.0.fill_buf()?;
        Ok(&rest[..rest.len().min(Self::PIECE)])
    }

    fn consume(&mut self, bytes: usize) {
        spend(bytes * Self::UNITS_OF_A_BYTE);
        self.0.consume(bytes);
    }
}

impl Seek for Watched<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

/// Allocates the decoded pixels and the output from the budget, lets `decode` fill the former, and
/// converts them to the latter.
fn put_out(
    cx: &mut RunCx<'_>,
    layout: &Layout,
    format: PixelFormat,
    decode: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    // Both before decoding, so that the budget refuses an image by its header.
    let mut output = cx.allocate(DType::U8, &[layout.height, layout.width, format.channels()])?;
    let mut decoded = cx.allocate(DType::U8, &[layout.bytes()])?;
    let decoded = decoded.as_mut_slice::<u8>()?;
    decode(decoded)?;
    layout.convert(decoded, format, output.as_mut_slice::<u8>()?);
    cx.set(0, Value::Tensor(output.finish()?))
}

fn decode_common(cx: &mut RunCx<'_>, encoded: &[u8], format: PixelFormat) -> Result<()> {
    let mut reader =
        ImageReader::new(Watched::new(encoded)).with_guessed_format().map_err(|problem| damaged(&problem))?;
    let mut limits = Limits::default();
    limits.max_alloc = Some(MOST_BYTES);
    reader.limits(limits);
    let decoder = reader.into_decoder().map_err(|problem| damaged(&problem))?;
    let (width, height) = decoder.dimensions();
    // The header decides the sizes; nothing is decoded yet.
    let color = decoder.color_type();
    let channels = usize::from(color.channel_count());
    let sample = usize::from(color.bytes_per_pixel()) / channels.max(1);
    let layout = Layout::new([width, height], channels, sample)?;
    ensure!(
        decoder.total_bytes() == layout.bytes() as u64,
        InvalidArgument,
        "the image's header says {} bytes, its size {}",
        decoder.total_bytes(),
        layout.bytes()
    );
    put_out(cx, &layout, format, |pixels| decoder.read_image(pixels).map_err(|problem| damaged(&problem)))
}

/// Decodes a PNG without its text chunks and colour profile. Pixels do not depend on them, and a
/// few bytes of either can unpack to any size.
fn decode_png(cx: &mut RunCx<'_>, encoded: &[u8], format: PixelFormat) -> Result<()> {
    let limits = png::Limits { bytes: MOST_BYTES as usize };
    let mut decoder = png::Decoder::new_with_limits(Watched::new(encoded), limits);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    decoder.set_transformations(png::Transformations::EXPAND);
    let mut reader = decoder.read_info().map_err(|problem| damaged(&problem))?;
    let (color, depth) = reader.output_color_type();
    let sample = if depth == png::BitDepth::Sixteen { 2 } else { 1 };
    let (width, height) = reader.info().size();
    let layout = Layout::new([width, height], color.samples(), sample)?;
    put_out(cx, &layout, format, |pixels| {
        reader.next_frame(pixels).map_err(|problem| damaged(&problem))?;
        // 16-bit samples are big-endian in the file and native-endian in `Layout`.
        if sample == 2 {
            for pair in pixels.as_chunks_mut::<2>().0 {
                *pair = u16::from_be_bytes(*pair).to_ne_bytes();
            }
        }
        Ok(())
    })
}

fn decode_jpeg(cx: &mut RunCx<'_>, encoded: &[u8], format: PixelFormat) -> Result<()> {
    let frame = Frame::of(encoded).map_err(|problem| damaged(&problem))?;
    let layout = Layout::new([frame.width as u32, frame.height as u32], 3, 1)?;
    // One byte per sample, and two per coefficient of a progressive image.
    let needed = frame.sample_bytes() + 2 * frame.coefficients();
    ensure!(
        needed as u64 <= MOST_BYTES,
        InvalidArgument,
        "decoding a JPEG of {} by {} pixels takes {needed} bytes, but at most {MOST_BYTES} may be used",
        layout.width,
        layout.height
    );
    let mut samples = cx.allocate(DType::U8, &[frame.sample_bytes()])?;
    let mut coefficients = cx.allocate(DType::I16, &[frame.coefficients()])?;
    let (samples, coefficients) = (samples.as_mut_slice()?, coefficients.as_mut_slice()?);
    // Progressive scans add to the coefficients.
    coefficients.fill(0);
    put_out(cx, &layout, format, |pixels| {
        let room = Room { samples, coefficients };
        jpeg::decode(encoded, &frame, room, pixels).map_err(|problem| damaged(&problem))
    })
}

fn decode_wavelets(cx: &mut RunCx<'_>, encoded: &[u8], format: PixelFormat) -> Result<()> {
    let image = Image::new(encoded, &DecodeSettings::default()).map_err(|problem| damaged(&problem))?;
    let channels = usize::from(image.color_space().num_channels()) + usize::from(image.has_alpha());
    ensure!(
        image.color_space().num_channels() != 4,
        NotImplemented,
        "JPEG 2000 with four colours; convert the image to RGB"
    );
    let layout = Layout::new([image.width(), image.height()], channels, 1)?;
    let needed = layout.bytes() as u64 * BYTES_PER_WAVELET_SAMPLE;
    ensure!(
        needed <= MOST_BYTES,
        InvalidArgument,
        "decoding a JPEG 2000 image of {} by {} pixels takes {needed} bytes, but at most {MOST_BYTES} may be used",
        layout.width,
        layout.height
    );
    put_out(cx, &layout, format, |pixels| {
        let mut context = DecoderContext::default();
        let decoded = image.decode(&mut context).map_err(|problem| damaged(&problem))?;
        let bytes = decoded.data_u8();
        let (found, expected) = (bytes.len(), pixels.len());
        ensure!(
            found == expected,
            InvalidArgument,
            "the image decodes to {found} bytes, expected {expected}"
        );
        pixels.copy_from_slice(&bytes);
        Ok(())
    })
}
