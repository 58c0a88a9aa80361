//! JPEG decoder: sequential and progressive, Huffman-coded, 8 bits per sample.
//!
//! These are the forms that the standard's ImageDecoder requires, decoded without unsafe code. The
//! pixels match libjpeg-turbo bit for bit, because the standard requires that library's chroma
//! upsampling, which no decoder in safe Rust has. Arithmetic coding, 12-bit samples and lossless
//! JPEG are rejected. The format is ITU-T T.81; `pixels.rs` holds what it leaves to the decoder.

mod damage;
mod entropy;
mod pixels;

pub(super) use damage::Damage;
use entropy::{Band, Bits, Coded, Huffman, Progress, place, progressive_first, progressive_rest, sequential};
use pixels::{Plane, over_black, rgb, samples};

use ort_cpu_threads::interrupt::spend;

/// Maximum scans. No image needs more, and each scan visits every block, however few bytes it has.
const MOST_SCANS: usize = 100;

/// One channel as it is stored.
#[derive(Debug)]
struct Component {
    id: u8,
    /// Blocks per MCU in each direction (sampling factors).
    across: usize,
    down: usize,
    /// The index of its quantization table.
    quantization: usize,
    /// Blocks of the component, including the padding of the last MCUs.
    columns: usize,
    rows: usize,
    /// The index of its first block among those of all components.
    first_block: usize,
}

/// The frame header.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) width: usize,
    pub(super) height: usize,
    is_progressive: bool,
    components: Vec<Component>,
    /// The maximum sampling factors of all components.
    across: usize,
    down: usize,
}

impl Frame {
    /// Reads the frame header of a file.
    pub(super) fn of(bytes: &[u8]) -> Result<Frame, Damage> {
        // Skips the start-of-image marker.
        let mut segments = Segments { bytes, at: 2 };
        loop {
            let (marker, body) = segments.next()?;
            match marker {
                // SOF0 to SOF2: baseline, extended sequential, and progressive with Huffman codes.
                0xc0..=0xc2 => return Frame::parse(body, marker == 0xc2),
                0xc3 | 0xc5..=0xc7 | 0xcd..=0xcf => {
                    return Err(Damage::Unsupported("without loss, or in hierarchies,"));
                }
                0xc9..=0xcb => return Err(Damage::Unsupported("with arithmetic codes")),
                // A scan (SOS) cannot precede the frame.
                0xda => return Err(Damage::Form("its data comes before its size")),
                _ => {}
            }
        }
    }

    fn parse(body: &[u8], is_progressive: bool) -> Result<Frame, Damage> {
        let (&[precision, h1, h0, w1, w0, count], rest) = body.split_first_chunk().ok_or(Damage::Cut)?;
        if precision != 8 {
            return Err(Damage::Unsupported("of more than 8 bits"));
        }
        let (height, width) =
            (usize::from(u16::from_be_bytes([h1, h0])), usize::from(u16::from_be_bytes([w1, w0])));
        // A height of 0 would come later in a DNL segment, which is not supported.
        if height == 0 || width == 0 {
            return Err(Damage::Form("its size is 0"));
        }
        if !matches!(count, 1 | 3 | 4) || rest.len() != usize::from(count) * 3 {
            return Err(Damage::Form("it has not 1, 3 or 4 components"));
        }
        let mut components = Vec::new();
        for part in rest.chunks_exact(3) {
            let &[id, factors, quantization] = part else { return Err(Damage::Cut) };
            let (across, down) = (usize::from(factors >> 4), usize::from(factors & 15));
            if !(1..=4).contains(&across) || !(1..=4).contains(&down) || quantization > 3 {
                return Err(Damage::Form("its components have factors beyond 1 to 4"));
            }
            if components.iter().any(|other: &Component| other.id == id) {
                return Err(Damage::Form("two components have one name"));
            }
            let quantization = usize::from(quantization);
            components.push(Component {
                id,
                across,
                down,
                quantization,
                columns: 0,
                rows: 0,
                first_block: 0,
            });
        }
        // The sampling factors of a single component have no effect.
        if let [one] = &mut components[..] {
            (one.across, one.down) = (1, 1);
        }
        let most = |factor: fn(&Component) -> usize| components.iter().map(factor).max().unwrap_or(1);
        let (across, down) = (most(|it| it.across), most(|it| it.down));
        if components.iter().any(|it| !across.is_multiple_of(it.across) || !down.is_multiple_of(it.down)) {
            return Err(Damage::Unsupported("with fractions of samples"));
        }
        let mut blocks = 0;
        for it in &mut components {
            // Whole MCUs, because interleaved scans code their padding too.
            it.columns = width.div_ceil(8 * across) * it.across;
            it.rows = height.div_ceil(8 * down) * it.down;
            it.first_block = blocks;
            blocks += it.columns * it.rows;
        }
        Ok(Frame { width, height, is_progressive, components, across, down })
    }

    fn blocks(&self) -> usize {
        self.components.iter().map(|it| it.columns * it.rows).sum()
    }

    /// Returns the bytes of the samples of all components.
    pub(super) fn sample_bytes(&self) -> usize {
        self.blocks() * 64
    }

    /// Returns the coefficients to keep between scans.
    pub(super) fn coefficients(&self) -> usize {
        if self.is_progressive { self.blocks() * 64 } else { 0 }
    }

    /// Returns the columns and rows of a component that belong to the image.
    fn size_of(&self, it: &Component) -> (usize, usize) {
        ((self.width * it.across).div_ceil(self.across), (self.height * it.down).div_ceil(self.down))
    }
}

/// The segments of a file between its markers.
struct Segments<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Segments<'a> {
    /// Returns the next marker and its segment.
    fn next(&mut self) -> Result<(u8, &'a [u8]), Damage> {
        loop {
            // Skips bytes between segments, which libjpeg skips too.
            let rest = self.bytes.get(self.at..).ok_or(Damage::Cut)?;
            self.at += rest.iter().position(|byte| *byte == 0xff).ok_or(Damage::Cut)? + 1;
            let marker = *self.bytes.get(self.at).ok_or(Damage::Cut)?;
            match marker {
                0 => {}
                // Fill bytes: the last of them may start a marker.
                0xff => continue,
                0xd0..=0xd8 | 0x01 => self.at += 1,
                0xd9 => return Ok((marker, &[])),
                _ => {
                    let length = self.bytes.get(self.at + 1..self.at + 3).ok_or(Damage::Cut)?;
                    let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
                    let start = self.at + 3;
                    // The length counts its own two bytes; at least these are skipped.
                    self.at += 1 + length.max(2);
                    return Ok((marker, self.bytes.get(start..self.at).ok_or(Damage::Cut)?));
                }
            }
        }
    }
}

/// The colour space of the components.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Colours {
    Grey,
    YCbCr,
    Rgb,
    Cmyk,
    Ycck,
}

/// The tables and settings that segments before a scan define.
#[derive(Default)]
struct Tables {
    quantization: [Option<Box<[u16; 64]>>; 4],
    dc: [Option<Huffman>; 4],
    ac: [Option<Huffman>; 4],
    restart: usize,
    is_jfif: bool,
    adobe: Option<u8>,
}

impl Tables {
    fn take(&mut self, marker: u8, body: &[u8]) -> Result<(), Damage> {
        match marker {
            0xdb => self.quantization(body),
            0xc4 => self.codes(body),
            0xdd => {
                let (length, _) = body.split_first_chunk().ok_or(Damage::Cut)?;
                self.restart = usize::from(u16::from_be_bytes(*length));
                Ok(())
            }
            0xe0 if body.starts_with(b"JFIF\0") => {
                self.is_jfif = true;
                Ok(())
            }
            0xee if body.starts_with(b"Adobe") => {
                self.adobe = body.get(11).copied();
                Ok(())
            }
            0xdc => Err(Damage::Unsupported("with its height at its end")),
            _ => Ok(()),
        }
    }

    fn quantization(&mut self, mut body: &[u8]) -> Result<(), Damage> {
        while let Some((&first, rest)) = body.split_first() {
            let size = if first >> 4 == 0 { 1 } else { 2 };
            let (own, rest) = rest.split_at_checked(64 * size).ok_or(Damage::Cut)?;
            let mut table = Box::new([0; 64]);
            for (index, step) in own.chunks_exact(size).enumerate() {
                if let Some(to) = table.get_mut(place(index)) {
                    // Big-endian, in zigzag order.
                    *to = step.iter().fold(0, |step, byte| step << 8 | u16::from(*byte));
                }
            }
            *self
                .quantization
                .get_mut(usize::from(first & 15))
                .ok_or(Damage::Form("a table has no place"))? = Some(table);
            body = rest;
        }
        Ok(())
    }

    fn codes(&mut self, mut body: &[u8]) -> Result<(), Damage> {
        while let Some((&first, rest)) = body.split_first() {
            let (counts, rest) = rest.split_first_chunk::<16>().ok_or(Damage::Cut)?;
            let total: usize = counts.iter().map(|count| usize::from(*count)).sum();
            let (values, rest) = rest.split_at_checked(total).ok_or(Damage::Cut)?;
            let tables = if first >> 4 == 0 { &mut self.dc } else { &mut self.ac };
            let to = tables.get_mut(usize::from(first & 15)).ok_or(Damage::Form("a table has no place"))?;
            *to = Some(Huffman::new(counts, values)?);
            body = rest;
        }
        Ok(())
    }

    /// Returns the colour space of the components, by libjpeg's rules.
    fn colours(&self, frame: &Frame) -> Colours {
        let ids: Vec<u8> = frame.components.iter().map(|it| it.id).collect();
        match (&ids[..], self.adobe) {
            ([_], _) => Colours::Grey,
            ([_, _, _], _) if self.is_jfif => Colours::YCbCr,
            ([_, _, _], Some(0)) => Colours::Rgb,
            (b"RGB", None) => Colours::Rgb,
            ([_, _, _], _) => Colours::YCbCr,
            (_, None | Some(0)) => Colours::Cmyk,
            _ => Colours::Ycck,
        }
    }
}

/// The buffers that decoding needs.
pub(super) struct Room<'a> {
    /// The samples of all components: [`Frame::sample_bytes`] elements.
    pub(super) samples: &'a mut [u8],
    /// Zeroed coefficients: [`Frame::coefficients`] elements.
    pub(super) coefficients: &'a mut [i16],
}

/// Decodes a file to RGB pixels.
pub(super) fn decode(bytes: &[u8], frame: &Frame, room: Room<'_>, pixels: &mut [u8]) -> Result<(), Damage> {
    let Room { samples, coefficients } = room;
    let mut decoder =
        Decoder { frame, tables: Tables::default(), steps: [const { None }; 4], samples, coefficients };
    let mut segments = Segments { bytes, at: 2 };
    let mut scans = 0;
    loop {
        let (marker, body) = match segments.next() {
            Ok(found) => found,
            // Many files lack the end-of-image marker.
            Err(_) if scans > 0 && decoder.is_whole() => break,
            Err(problem) => return Err(problem),
        };
        match marker {
            0xd9 if decoder.is_whole() => break,
            0xd9 => return Err(Damage::Cut),
            0xda => {
                scans += 1;
                if scans > MOST_SCANS {
                    return Err(Damage::Form("it has more scans than any image needs"));
                }
                segments.at = decoder.scan(body, Bits::new(bytes, segments.at))?;
            }
            _ => decoder.tables.take(marker, body)?,
        }
    }
    decoder.transform_kept();
    decoder.put_out(pixels);
    Ok(())
}

struct Decoder<'a> {
    frame: &'a Frame,
    tables: Tables,
    /// The quantization table of each component, as of its first scan.
    steps: [Option<Box<[u16; 64]>>; 4],
    samples: &'a mut [u8],
    coefficients: &'a mut [i16],
}

/// A component of a scan and the indices of its Huffman tables.
struct Scanned {
    component: usize,
    dc: usize,
    ac: usize,
}

impl Decoder<'_> {
    /// Whether every component has appeared in a scan.
    fn is_whole(&self) -> bool {
        self.steps.iter().take(self.frame.components.len()).all(Option::is_some)
    }

    /// Decodes a scan. Returns the position after it.
    fn scan(&mut self, body: &[u8], bits: Bits<'_>) -> Result<usize, Damage> {
        let (&count, rest) = body.split_first().ok_or(Damage::Cut)?;
        let (parts, rest) = rest.split_at_checked(usize::from(count) * 2).ok_or(Damage::Cut)?;
        let &[first, last, bands] = rest else {
            return Err(Damage::Form("a scan's header has another length"));
        };
        let mut scanned: Vec<Scanned> = Vec::new();
        for part in parts.chunks_exact(2) {
            let &[id, tables] = part else { return Err(Damage::Cut) };
            let component = self.frame.components.iter().position(|it| it.id == id);
            let component = component.ok_or(Damage::Form("a scan has a component that is not there"))?;
            if scanned.iter().any(|other| other.component == component) {
                return Err(Damage::Form("a scan has a component twice"));
            }
            scanned.push(Scanned { component, dc: usize::from(tables >> 4), ac: usize::from(tables & 15) });
            self.keep_steps(component)?;
        }
        let band = self.band(scanned.len(), [first, last, bands])?;
        let mut coded = Coded { bits, progress: Progress::default() };
        let (columns, rows) = self.units(&scanned);
        let mut left = self.tables.restart;
        // No overflow: sizes have 16 bits.
        for unit in 0..columns * rows {
            // Counted per MCU, because even a scan of few bytes visits all blocks of a huge image.
            spend(64 * scanned.len());
            if self.tables.restart > 0 {
                if left == 0 {
                    coded.bits.restart()?;
                    // A restart resets the DC predictions and the end-of-band run.
                    coded.progress = Progress::default();
                    left = self.tables.restart;
                }
                left -= 1;
            }
            self.unit(&scanned, [unit % columns, unit / columns], band, &mut coded)?;
        }
        Ok(coded.bits.end())
    }

    fn keep_steps(&mut self, component: usize) -> Result<(), Damage> {
        let own = self.frame.components.get(component).map_or(0, |it| it.quantization);
        let table = self.tables.quantization.get(own).and_then(Option::as_ref);
        // A file may redefine its tables between scans.
        if let Some(steps) = self.steps.get_mut(component).filter(|steps| steps.is_none()) {
            *steps = Some(table.ok_or(Damage::Form("a quantization table is missing"))?.clone());
        }
        Ok(())
    }

    fn band(&self, components: usize, [first, last, bands]: [u8; 3]) -> Result<Band, Damage> {
        let band = Band {
            first: usize::from(first),
            last: usize::from(last),
            high: u32::from(bands >> 4),
            low: u32::from(bands & 15),
        };
        if components == 0 {
            return Err(Damage::Form("a scan has no components"));
        }
        // Sequential scans code all coefficients, whatever their header says.
        if !self.frame.is_progressive {
            return Ok(Band { first: 0, last: 63, high: 0, low: 0 });
        }
        // DC and AC coefficients need scans of their own, and AC scans have one component.
        let is_first = band.first == 0;
        let fits = if is_first {
            band.last == 0
        } else {
            band.last >= band.first && band.last < 64 && components == 1
        };
        if !fits || band.low > 13 || (band.high != 0 && band.high != band.low + 1) {
            return Err(Damage::Form("a scan's coefficients do not fit"));
        }
        Ok(band)
    }

    /// Returns the columns and rows of MCUs of a scan. A scan of one component has one block per
    /// MCU and no padding blocks.
    fn units(&self, scanned: &[Scanned]) -> (usize, usize) {
        let frame = self.frame;
        let alone = match scanned {
            [one] => frame.components.get(one.component),
            _ => None,
        };
        match alone {
            Some(it) => {
                let (width, height) = frame.size_of(it);
                (width.div_ceil(8), height.div_ceil(8))
            }
            None => (frame.width.div_ceil(8 * frame.across), frame.height.div_ceil(8 * frame.down)),
        }
    }

    /// Decodes one MCU.
    fn unit(
        &mut self,
        scanned: &[Scanned],
        [column, row]: [usize; 2],
        band: Band,
        coded: &mut Coded<'_>,
    ) -> Result<(), Damage> {
        let frame = self.frame;
        for own in scanned {
            let Some(it) = frame.components.get(own.component) else { continue };
            let (across, down) = if scanned.len() == 1 { (1, 1) } else { (it.across, it.down) };
            for index in 0..across * down {
                let (x, y) = (column * across + index % across, row * down + index / across);
                let block = it.first_block + y * it.columns + x;
                self.block(own, block, band, coded)?;
            }
        }
        Ok(())
    }

    fn block(
        &mut self,
        own: &Scanned,
        block: usize,
        band: Band,
        Coded { bits, progress }: &mut Coded<'_>,
    ) -> Result<(), Damage> {
        let missing = Damage::Form("a table of codes is missing");
        let dc = self.tables.dc.get(own.dc).and_then(Option::as_ref);
        let ac = self.tables.ac.get(own.ac).and_then(Option::as_ref);
        let last = progress.dc.get_mut(own.component).ok_or(Damage::Codes)?;
        // Sequential blocks are complete, so they are transformed at once.
        if !self.frame.is_progressive {
            let (Some(dc), Some(ac)) = (dc, ac) else { return Err(missing) };
            let mut coefficients = [0; 64];
            sequential(bits, [dc, ac], last, &mut coefficients)?;
            self.transform(own.component, block, &coefficients);
            return Ok(());
        }
        let kept = self.coefficients.get_mut(block * 64..block * 64 + 64).ok_or(Damage::Codes)?;
        if band.first == 0 {
            return progressive_first(bits, dc, band, last, kept);
        }
        progressive_rest(bits, ac.ok_or(missing)?, band, &mut progress.ends, kept)
    }

    /// Runs the inverse DCT on a block and stores its samples.
    fn transform(&mut self, component: usize, block: usize, coefficients: &[i16; 64]) {
        let it = self.frame.components.get(component);
        let steps = self.steps.get(component).and_then(Option::as_ref);
        let (Some(it), Some(steps)) = (it, steps) else { return };
        // `unit` counted the block from the first one of its component.
        let own = block - it.first_block;
        let stride = it.columns * 8;
        let start = it.first_block * 64 + own / it.columns * 8 * stride + own % it.columns * 8;
        spend(128);
        let block = samples(coefficients, steps);
        for (row, from) in block.chunks_exact(8).enumerate() {
            if let Some(to) = self.samples.get_mut(start + row * stride..start + row * stride + 8) {
                to.copy_from_slice(from);
            }
        }
    }

    /// Transforms all blocks of a progressive image.
    fn transform_kept(&mut self) {
        if !self.frame.is_progressive {
            return;
        }
        let mut coefficients = [0; 64];
        for (component, it) in self.frame.components.iter().enumerate() {
            for block in it.first_block..it.first_block + it.columns * it.rows {
                if let Some(kept) = self.coefficients.get(block * 64..block * 64 + 64) {
                    coefficients.copy_from_slice(kept);
                    self.transform(component, block, &coefficients);
                }
            }
        }
    }

    /// Upsamples, converts and writes the pixels, row by row.
    fn put_out(&self, pixels: &mut [u8]) {
        let frame = self.frame;
        let plane = |it: &Component| {
            let (width, height) = frame.size_of(it);
            let samples = self.samples.get(it.first_block * 64..).unwrap_or_default();
            let (rows, columns) = (frame.down / it.down, frame.across / it.across);
            Plane { samples, stride: it.columns * 8, height, width, rows, columns }
        };
        let planes: Vec<Plane<'_>> = frame.components.iter().map(plane).collect();
        let colours = self.tables.colours(frame);
        let is_inverted = self.tables.adobe.is_some();
        let mut channels = [const { Vec::new() }; 4];
        channels.iter_mut().for_each(|channel: &mut Vec<u8>| channel.resize(frame.width, 0));
        let mut sums = Vec::new();
        for (row, to) in pixels.chunks_exact_mut(frame.width * 3).enumerate() {
            spend(8 * frame.width);
            for (plane, channel) in planes.iter().zip(&mut channels) {
                plane.full_row(row, &mut sums, channel);
            }
            let [one, two, three, four] = &channels;
            let values = one.iter().zip(two).zip(three).zip(four);
            for (to, (((one, two), three), four)) in to.chunks_exact_mut(3).zip(values) {
                let stored = [*one, *two, *three];
                let pixel = match colours {
                    Colours::Grey => [*one; 3],
                    Colours::YCbCr => rgb(stored),
                    Colours::Rgb => stored,
                    Colours::Cmyk | Colours::Ycck => inks(colours, stored, *four, is_inverted),
                };
                to.copy_from_slice(&pixel);
            }
        }
    }
}

/// Converts CMYK to RGB. Adobe's programs store inverted inks.
fn inks(colours: Colours, stored: [u8; 3], black: u8, is_inverted: bool) -> [u8; 3] {
    let stored = if colours == Colours::Ycck { rgb(stored).map(|channel| 255 - channel) } else { stored };
    let light = |ink: u8| if is_inverted { ink } else { 255 - ink };
    stored.map(|ink| over_black(light(ink), light(black)))
}
