//! Arrays of every type there and back, and files that no honest writer makes.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use std::io::{Cursor, Write};

use ort_core::dtype::DType;
use ort_core::ir::ValueType;
use ort_core::tensor::{MapKeys, MapValue, OptionalValue, SequenceValue, Tensor, Value};
use ort_numpy::{Archive, HEADER_BYTES, read_npy, write_npz};

const MOST: usize = 1 << 20;

fn npy(header: &str, data: &[u8]) -> Vec<u8> {
    let mut header = header.to_string();
    header.push('\n');
    [b"\x93NUMPY\x01\x00", &(header.len() as u16).to_le_bytes()[..], header.as_bytes(), data].concat()
}

fn array(descr: &str, order: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    npy(&format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}"), data)
}

fn read(bytes: &[u8]) -> ort_core::Result<Tensor> {
    read_npy(bytes, bytes.len() as u64, MOST)
}

fn values() -> Vec<(String, Value)> {
    let tensor = |values: &[f32]| Value::from(Tensor::from_slice(&[values.len()], values).unwrap());
    let texts = |texts: &[&str]| {
        Tensor::from_strings(&[texts.len()], texts.iter().map(|text| text.to_string()).collect()).unwrap()
    };
    let (element_type, elements) = (ValueType::Unknown, vec![tensor(&[1.0]), tensor(&[2.0, 3.0])]);
    let sequence = SequenceValue { element_type: element_type.clone(), elements };
    let map = |keys| Value::Map(MapValue { keys, values: Box::new(tensor(&[0.25, 0.75])) });
    let maps = SequenceValue {
        element_type: element_type.clone(),
        elements: vec![map(MapKeys::Ints(DType::I64, vec![3, -4]))],
    };
    let optional = |element| Value::Optional(OptionalValue { element_type: element_type.clone(), element });
    vec![
        (
            "half".into(),
            Tensor::from_slice(&[2], &[half::bf16::from_f32(1.5), half::bf16::from_f32(-2.0)])
                .unwrap()
                .into(),
        ),
        ("sequence".into(), Value::Sequence(sequence)),
        ("absent".into(), optional(None)),
        ("present".into(), optional(Some(Box::new(tensor(&[4.0]))))),
        ("texts".into(), texts(&["", "grün", "猫"]).into()),
        ("no texts".into(), texts(&[]).into()),
        ("named".into(), map(MapKeys::Strings(vec!["a".into(), "bc".into()]))),
        ("maps".into(), Value::Sequence(maps)),
        ("scalar".into(), Tensor::from_slice(&[], &[7i64]).unwrap().into()),
        ("empty".into(), Tensor::from_slice(&[2, 0], &[0u8; 0]).unwrap().into()),
    ]
}

fn shown(tensor: &Tensor) -> String {
    let shape = tensor.shape();
    match tensor.dtype() {
        DType::String => format!("{shape:?} {:?}", tensor.strings().unwrap()),
        _ => format!("{shape:?} {:?}", tensor.to_doubles().unwrap()),
    }
}

#[test]
fn values_of_every_kind_are_written_and_read() {
    let mut file = Cursor::new(Vec::new());
    write_npz(&mut file, &values()).unwrap();
    file.set_position(0);
    let arrays = Archive::open(file).unwrap().read_all(MOST).unwrap();
    let found: Vec<(&str, String)> =
        arrays.iter().map(|(name, tensor)| (name.as_str(), shown(tensor))).collect();
    let expected = [
        ("half", "[2] [1.5, -2.0]"),
        ("sequence[0]", "[1] [1.0]"),
        ("sequence[1]", "[2] [2.0, 3.0]"),
        ("present", "[1] [4.0]"),
        ("texts", r#"[3] ["", "grün", "猫"]"#),
        ("no texts", "[0] []"),
        ("named.keys", r#"[2] ["a", "bc"]"#),
        ("named.values", "[2] [0.25, 0.75]"),
        ("maps[0].keys", "[2] [3.0, -4.0]"),
        ("maps[0].values", "[2] [0.25, 0.75]"),
        ("scalar", "[] [7.0]"),
        ("empty", "[2, 0] []"),
    ];
    assert_eq!(found, expected.map(|(name, text)| (name, text.to_string())));
}

#[test]
fn an_archive_of_many_arrays_is_read_quickly() {
    let value = |number: usize| Value::from(Tensor::from_slice(&[], &[number as i64]).unwrap());
    let values: Vec<(String, Value)> =
        (0..60_000).map(|number| (format!("{number:05}"), value(number))).collect();
    let mut file = Cursor::new(Vec::new());
    write_npz(&mut file, &values).unwrap();
    file.set_position(0);
    let mut archive = Archive::open(file).unwrap();
    let start = std::time::Instant::now();
    let arrays = archive.read_all(MOST).unwrap();
    // With a linear search for each name, the time is quadratic.
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
    assert_eq!(arrays.len(), values.len());
    assert_eq!((arrays[777].0.as_str(), shown(&arrays[777].1)), ("00777", "[] [777.0]".to_string()));
}

#[test]
fn what_an_archive_cannot_hold_is_an_error() {
    let text = |text: &str| Value::from(Tensor::from_strings(&[1], vec![text.to_string()]).unwrap());
    for (values, words) in [
        (vec![("t", text("ends\0"))], "ends in a zero"),
        (vec![("t", text("a")), ("t", text("b"))], "two arrays would have the name 't'"),
    ] {
        let values: Vec<(String, Value)> =
            values.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        let problem = write_npz(Cursor::new(Vec::new()), &values).unwrap_err().to_string();
        assert!(problem.contains(words), "{problem}");
    }
}

/// A disk that is full after N bytes.
struct FullDisk(Cursor<Vec<u8>>, u64);

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.position() + bytes.len() as u64 > self.1 {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl std::io::Seek for FullDisk {
    fn seek(&mut self, to: std::io::SeekFrom) -> std::io::Result<u64> {
        self.0.seek(to)
    }
}

#[test]
fn a_full_disk_is_an_error_wherever_it_is_full() {
    let mut whole = Cursor::new(Vec::new());
    write_npz(&mut whole, &values()).unwrap();
    let length = whole.into_inner().len() as u64;
    for room in (0..length).step_by(61).chain([length - 1]) {
        assert!(write_npz(FullDisk(Cursor::new(Vec::new()), room), &values()).is_err(), "room for {room}");
    }
    assert!(write_npz(FullDisk(Cursor::new(Vec::new()), length), &values()).is_ok());
}

#[test]
fn arrays_of_other_orders_become_those_of_tensors() {
    let fortran = array("<i2", "True", "(2, 3)", &[1, 0, 4, 0, 2, 0, 5, 0, 3, 0, 6, 0]);
    assert_eq!(read(&fortran).unwrap().to_vec::<i16>().unwrap(), [1, 2, 3, 4, 5, 6]);
    let swapped = array(">f4", "False", "(1,)", &1.5f32.to_be_bytes());
    assert_eq!(read(&swapped).unwrap().to_vec::<f32>().unwrap(), [1.5]);
    let texts = array("|S3", "True", "(2, 2)", b"a\0\0bc\0def\0\0\0");
    assert_eq!(read(&texts).unwrap().strings().unwrap(), ["a", "def", "bc", ""]);
    let flags = array("|b1", "False", "(3,)", &[0, 1, 255]);
    assert_eq!(read(&flags).unwrap().bytes().unwrap().as_ref(), [0, 1, 1]);
    let old = npy(r#"{"shape":(2L,),'fortran_order':False , "descr" : "|u1" }"#, &[8, 9]);
    assert_eq!(read(&old).unwrap().to_vec::<u8>().unwrap(), [8, 9]);
}

#[test]
fn files_that_no_honest_writer_makes_are_refused() {
    let open = "(".repeat(200);
    let shape = |shape: &str| array("<f4", "False", shape, &[0; 16]);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "fewer than 8 bytes"),
        ("another file", b"PK\x03\x04............".to_vec(), "does not begin with"),
        ("a version that is not there", b"\x93NUMPY\x09\x00\x10\x00".to_vec(), "version 9"),
        ("a header that is cut", b"\x93NUMPY\x01\x00\x76\x00{'descr'".to_vec(), "cut short"),
        ("a header of 4 GiB", b"\x93NUMPY\x02\x00\xff\xff\xff\xff{".to_vec(), "header has 4294967295 bytes"),
        (
            "a header that is no text",
            npy("{'descr': '\u{7f}", &[]).iter().map(|b| if *b == 0x7f { 0xff } else { *b }).collect(),
            "no text",
        ),
        ("brackets that never end", npy(&open, &[]), "where '{' is due"),
        ("brackets in the shape that never end", shape(&open), "the size"),
        ("strings that never end", npy("{'descr", &[]), "does not end"),
        ("minus signs without end", shape(&format!("({}1,)", "-".repeat(200))), "the size"),
        ("sums without end", shape(&format!("({}1,)", "1+".repeat(100))), "is due"),
        (
            "a list in the type",
            npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", &[0; 4]),
            "structured arrays",
        ),
        ("a pickle", array("|O", "False", "(1,)", b"\x80\x04."), "object arrays are pickles"),
        ("a type of times", array("<M8[ns]", "False", "(1,)", &[0; 8]), "type '<M8[ns]'"),
        ("no type", array("", "False", "(1,)", &[0; 8]), "type ''"),
        (
            "a key twice",
            npy("{'shape': (1,), 'shape': (2,), 'descr': '<f4', 'fortran_order': False}", &[0; 8]),
            "twice",
        ),
        ("another key", npy("{'size': 4}", &[]), "the key 'size'"),
        ("no shape", npy("{'descr': '<f4', 'fortran_order': False}", &[]), "not all of"),
        (
            "something after the end",
            npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + 1", &[0; 4]),
            "after its end",
        ),
        ("a negative size", shape("(-1,)"), "the size"),
        ("a size beyond 64 bits", shape("(99999999999999999999999,)"), "the size"),
        ("sizes that overflow", shape("(4294967296, 4294967296, 4294967296)"), ""),
        ("more bytes than are there", shape("(5,)"), "takes 20 bytes, 16 are there"),
        ("30 GB", shape("(7500000000,)"), "are there"),
        ("a thousand axes", shape(&format!("({})", "1,".repeat(1000))), "more than 64 axes"),
        ("texts of no characters without end", array("<U0", "False", "(9000000000000,)", &[]), "at most"),
        ("a text of 2^61 characters", array("<U2305843009213693952", "False", "(8,)", &[]), "too many bytes"),
        ("a text that is no code point", array("<U1", "False", "(1,)", &[0, 0xd8, 0, 0]), "not Unicode"),
        ("bytes that are no text", array("|S1", "False", "(1,)", &[0xff]), "not Unicode"),
        ("an order that is neither", array("<f4", "Maybe", "(1,)", &[0; 4]), "fortran_order 'Maybe'"),
        ("control characters in the type", array("<\u{1b}[2J", "False", "(1,)", &[0; 4]), "\\u{1b}[2J"),
        ("the longest header", npy(&" ".repeat(HEADER_BYTES + 1), &[]), "header has"),
    ];
    let mut wrong = Vec::new();
    for (name, bytes, words) in &cases {
        let start = std::time::Instant::now();
        let said = read(bytes)
            .map_or_else(|problem| problem.to_string(), |tensor| format!("read {:?}", tensor.shape()));
        let is_right = said.contains(words) && !said.starts_with("read") && said.len() < 4096;
        if !is_right || start.elapsed().as_secs() > 1 {
            wrong.push(format!("{name}: {said} (after {:?})", start.elapsed()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cases.len() >= 30);
}

/// An archive of one entry, as deflate packs it, with sizes that may be lies.
fn packed(name: &str, data: &[u8]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    let options =
        zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
    writer.start_file(name, options).unwrap();
    writer.write_all(data).unwrap();
    writer.finish().unwrap().into_inner()
}

/// Writes another number over each four bytes that hold this one.
fn lie(bytes: &[u8], from: u32, to: u32) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for at in 0..bytes.len() - 3 {
        if bytes[at..at + 4] == from.to_le_bytes() {
            bytes[at..at + 4].copy_from_slice(&to.to_le_bytes());
        }
    }
    bytes
}

#[test]
fn archives_that_no_honest_writer_makes_are_refused() {
    let good = array("<f4", "False", "(4,)", &[0; 16]);
    let whole = packed("x.npy", &good);
    // 8 MiB of zeros in some kilobytes.
    let bomb = packed("x.npy", &array("|u1", "False", "(8388608,)", &vec![0; 8 << 20]));
    let promise = array("|u1", "False", "(4000000000,)", &[0; 64]);
    let liar = lie(&packed("x.npy", &promise), promise.len() as u32, 4_000_000_200);
    let mut damaged = bomb.clone();
    damaged[4000] ^= 0xff;
    let place = |magic: &[u8]| whole.windows(4).position(|bytes| bytes == magic).unwrap();
    let (directory, end) = (place(b"PK\x01\x02"), place(b"PK\x05\x06"));
    let changed = |at: &[usize], value: u8| {
        let mut bytes = whole.clone();
        at.iter().for_each(|at| bytes[*at] = value);
        bytes
    };
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], "does not begin like a ZIP file"),
        ("an array", good.clone(), "expected a .npz archive"),
        ("cut at its end", whole[..end].to_vec(), "no directory at its end"),
        ("cut in the middle", whole[..40].to_vec(), "no directory at its end"),
        ("only an end", [&b"PK\x05\x06"[..], &[0; 18]].concat(), "x"),
        ("a directory that is none", changed(&[directory + 2], 9), "damaged"),
        ("a bomb", bomb, "takes 8388608 bytes, but at most 1048576"),
        ("a shape of 4 GB and sizes that agree", liar, "are there"),
        ("damaged data", damaged, ""),
        ("an entry with another method", changed(&[8, directory + 10], 99), ""),
        ("zeros", vec![0; 100_000], "does not begin like a ZIP file"),
        ("a beginning and zeros", [&b"PK\x03\x04"[..], &[0; 200_000]].concat(), "no directory at its end"),
    ];
    let mut wrong = Vec::new();
    for (name, bytes, words) in &cases {
        let start = std::time::Instant::now();
        let read = Archive::open(Cursor::new(bytes)).and_then(|mut archive| archive.read("x", MOST));
        let said =
            read.map_or_else(|problem| problem.to_string(), |tensor| format!("read {:?}", tensor.shape()));
        if !said.contains(words) || said.starts_with("read") || start.elapsed().as_secs() > 1 {
            wrong.push(format!("{name}: {said} (after {:?})", start.elapsed()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Cuts and changes anywhere have a typed end.
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 0x55;
        for bytes in [&whole[..at], &changed] {
            let _ = Archive::open(Cursor::new(bytes)).and_then(|mut archive| archive.read("x", MOST));
        }
    }
}
