//! PNG decoding: pixels of every colour type, and decompression bombs in metadata.
#![cfg(all(feature = "cpu", feature = "image", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod hostile_support;
mod image_support;

use std::io::Write;
use std::sync::Mutex;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use hostile_support::{peak_above, reset_peak};
use image_support::{decode, session};
use ort_runtime::{Session, Tensor};

/// A test image: its header, the chunks between header and pixels, and its rows, each with its
/// filter byte first.
struct Form {
    size: [u8; 2],
    depth: u8,
    colour: u8,
    interlaced: u8,
    chunks: &'static [(&'static [u8; 4], &'static [u8])],
    rows: &'static [u8],
    /// The expected pixels as RGB.
    pixels: &'static [u8],
}

const FORM: Form =
    Form { size: [1, 1], depth: 8, colour: 0, interlaced: 0, chunks: &[], rows: &[0, 7], pixels: &[7; 3] };

/// Colour types and bit depths of section 11.2.2 of the standard, a filter, and interlacing.
const FORMS: &[(&str, Form)] = &[
    ("grey", FORM),
    (
        "grey of one bit",
        Form {
            size: [3, 1],
            depth: 1,
            rows: &[0, 0xa0],
            pixels: &[255, 255, 255, 0, 0, 0, 255, 255, 255],
            ..FORM
        },
    ),
    (
        "grey of 16 bits",
        Form {
            size: [2, 1],
            depth: 16,
            rows: &[0, 0xff, 0xff, 0x80, 0],
            pixels: &[255, 255, 255, 128, 128, 128],
            ..FORM
        },
    ),
    (
        "grey and opacity of 16 bits",
        Form { depth: 16, colour: 4, rows: &[0, 1, 1, 0, 0], pixels: &[1; 3], ..FORM },
    ),
    (
        "a palette",
        Form {
            size: [3, 1],
            depth: 2,
            colour: 3,
            chunks: &[(b"PLTE", &[10, 20, 30, 40, 50, 60, 70, 80, 90])],
            rows: &[0, 0b10_00_01_00],
            pixels: &[70, 80, 90, 10, 20, 30, 40, 50, 60],
            ..FORM
        },
    ),
    (
        "a palette with opacity",
        Form {
            colour: 3,
            chunks: &[(b"PLTE", &[1, 2, 3, 4, 5, 6]), (b"tRNS", &[9])],
            rows: &[0, 1],
            pixels: &[4, 5, 6],
            ..FORM
        },
    ),
    (
        "colour, as differences",
        Form {
            size: [2, 2],
            colour: 2,
            rows: &[1, 5, 6, 7, 1, 1, 1, 2, 1, 1, 1, 0, 0, 0],
            pixels: &[5, 6, 7, 6, 7, 8, 6, 7, 8, 6, 7, 8],
            ..FORM
        },
    ),
    (
        "colour and opacity",
        Form {
            size: [2, 1],
            colour: 6,
            rows: &[0, 1, 2, 3, 0, 4, 5, 6, 255],
            pixels: &[1, 2, 3, 4, 5, 6],
            ..FORM
        },
    ),
    (
        "interlaced",
        Form {
            size: [2, 2],
            interlaced: 1,
            rows: &[0, 1, 0, 2, 0, 3, 4],
            pixels: &[1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4],
            ..FORM
        },
    ),
];

impl Form {
    fn file(&self, more: &[(&[u8; 4], Vec<u8>)]) -> Vec<u8> {
        let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
        let [width, height] = self.size;
        let header = [0, 0, 0, width, 0, 0, 0, height, self.depth, self.colour, 0, 0, self.interlaced];
        add(&mut file, b"IHDR", &header);
        more.iter().for_each(|(kind, data)| add(&mut file, kind, data));
        self.chunks.iter().for_each(|(kind, data)| add(&mut file, kind, data));
        add(&mut file, b"IDAT", &packed(&[self.rows]));
        add(&mut file, b"IEND", &[]);
        file
    }
}

fn add(file: &mut Vec<u8>, kind: &[u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    file.extend([&kind[..], data].concat());
    let mut sum = flate2::Crc::new();
    sum.update(kind);
    sum.update(data);
    file.extend(sum.sum().to_be_bytes());
}

fn packed(parts: &[&[u8]]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    parts.iter().for_each(|part| encoder.write_all(part).unwrap());
    encoder.finish().unwrap()
}

fn check(session: &Session, name: &str, form: &Form, file: &[u8]) {
    let pixels = decode(session, file).unwrap();
    let [width, height] = form.size.map(usize::from);
    assert_eq!(pixels.shape(), [height, width, 3], "{name}");
    assert_eq!(pixels.to_vec::<u8>().unwrap(), form.pixels, "{name}");
}

/// Memory is measured for the whole process, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn pixels_of_all_forms_are_those_of_the_standard() {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    let session = session();
    for (name, form) in FORMS {
        check(&session, name, form, &form.file(&[]));
        let file = form.file(&[]);
        for end in 0..file.len() - 12 {
            assert!(decode(&session, &file[..end]).is_err(), "{name} cut at {end}");
        }
    }
}

/// Compressed metadata takes no memory, whatever size it unpacks to.
#[test]
fn profiles_and_texts_are_not_unpacked() {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    let zeros = vec![0; 1 << 20];
    let vast = packed(&vec![&zeros[..]; 200]);
    let session = session();
    let chunks = [
        (b"iCCP", [b"profile\0\0", &vast[..]].concat()),
        (b"zTXt", [b"Comment\0\0", &vast[..]].concat()),
        (b"iTXt", [b"Comment\0\x01\0\0\0", &vast[..]].concat()),
        (b"tEXt", [b"Comment\0", &vec![b'x'; 16 << 20][..]].concat()),
    ];
    check(&session, "small", &FORM, &FORM.file(&[]));
    for chunk in chunks {
        let file = FORM.file(std::slice::from_ref(&chunk));
        let kind = String::from_utf8_lossy(chunk.0);
        reset_peak();
        let input = Tensor::from_vec(&[file.len()], file).unwrap();
        let outputs = session.run(&[("file", input.into())]).unwrap();
        let taken = peak_above();
        assert_eq!(outputs[0].1.tensor().unwrap().to_vec::<u8>().unwrap(), FORM.pixels, "{kind}");
        assert!(taken < 4 << 20, "{kind} takes {taken} bytes");
    }
}
