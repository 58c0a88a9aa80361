//! JPEG images of all forms: the pixels are libjpeg-turbo's, and what is damaged has a typed end.
#![cfg(all(feature = "cpu", feature = "image"))]
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod image_support;

use std::time::{Duration, Instant};

use image_support::{decode, session};

/// A file, the size of its image, and a hash of its pixels.
struct Image {
    size: [usize; 2],
    hash: u64,
    file: Vec<u8>,
}

fn images() -> Vec<Image> {
    let lines = include_str!("data/jpeg_images.txt").lines().filter(|line| !line.starts_with('#'));
    let image = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let byte = |at: usize| u8::from_str_radix(&words[3][at..at + 2], 16).unwrap();
        Image {
            size: [words[1].parse().unwrap(), words[0].parse().unwrap()],
            hash: u64::from_str_radix(words[2], 16).unwrap(),
            file: (0..words[3].len()).step_by(2).map(byte).collect(),
        }
    };
    lines.map(image).collect()
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn pixels_are_those_of_libjpeg_turbo() {
    let (session, images) = (session(), images());
    assert!(images.len() > 50);
    for (index, image) in images.iter().enumerate() {
        let pixels = decode(&session, &image.file).unwrap();
        assert_eq!(pixels.shape(), [image.size[0], image.size[1], 3], "image {index}");
        assert_eq!(hash(&pixels.to_vec::<u8>().unwrap()), image.hash, "image {index}");
    }
}

#[test]
fn damaged_images_have_a_typed_end() {
    let session = session();
    let mut state = 7u64;
    let mut dice = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % below
    };
    let mut slowest = Duration::ZERO;
    for image in images().iter().step_by(3) {
        let cuts = (0..image.file.len()).step_by(23).map(|length| image.file[..length].to_vec());
        let flips: Vec<Vec<u8>> = (0..40)
            .map(|_| {
                let mut file = image.file.clone();
                for _ in 0..=dice(3) {
                    let at = dice(file.len());
                    file[at] = [0, 1, 0x7f, 0xff, file[at] ^ 0x10][dice(5)];
                }
                file
            })
            .collect();
        for file in cuts.chain(flips) {
            let start = Instant::now();
            if let Err(problem) = decode(&session, &file) {
                let text = problem.to_string();
                assert!(!text.contains("panicked"), "{text}");
            }
            slowest = slowest.max(start.elapsed());
        }
    }
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
}

#[test]
fn vast_images_and_endless_scans_are_refused() {
    let session = session();
    let image =
        images().into_iter().find(|image| image.file.windows(2).any(|two| two == [0xff, 0xc2])).unwrap();
    let at = image.file.windows(2).position(|two| two == [0xff, 0xc2]).unwrap();
    let mut vast = image.file.clone();
    vast[at + 5..at + 9].fill(0xff);
    // The first scan again and again.
    let start = image.file.windows(2).position(|two| two == [0xff, 0xda]).unwrap();
    let is_marker = |two: &[u8]| two[0] == 0xff && !matches!(two[1], 0 | 0xd0..=0xd7);
    let end = start + 2 + image.file[start + 2..].windows(2).position(is_marker).unwrap();
    let mut endless = image.file[..end].to_vec();
    (0..200).for_each(|_| endless.extend(&image.file[start..end]));
    endless.extend(&image.file[end..]);
    for (file, words) in [(vast, "pixels"), (endless, "scans")] {
        let problem = decode(&session, &file).unwrap_err().to_string();
        assert!(problem.contains(words), "{problem}");
    }
}
