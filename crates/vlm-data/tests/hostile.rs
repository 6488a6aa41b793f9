//! Pictures made to do harm: each ends in time and in bounded memory, with one line of an error or
//! with its patches.
//!
//! Each picture is encoded and checked by a process of its own, so that its peak of memory
//! and its processor time are known.
#![cfg(target_os = "linux")]
#![allow(clippy::disallowed_methods, reason = "test code")]

mod folder;

use std::path::Path;
use std::process::Command;

use folder::family_folder;
use png::{BitDepth, ColorType, Compression, Encoder, Filter};
use vlm_data::check::{CheckOptions, Severity, check_data};
use vlm_data::text::FileOptions;
use vlm_data::text::format::Conversations;
use vlm_data::{SampleEncoder, SampleOptions};

/// The bounds on each picture.
const MAX_SECONDS: f64 = 5.0;
const MAX_MIB: u64 = 1024;
/// The side of the largest square picture that is read.
const SIDE: u32 = 13_377;
const VARIABLE: &str = "VLM_DATA_HOSTILE";
/// What is done with a picture: its sample is encoded, patches included, or it is checked.
const WAYS: [&str; 2] = ["encode", "check"];
const WAY: &str = "VLM_DATA_HOSTILE_WAY";
/// The largest pictures of the published processors.
const PROCESSOR: &str = r#"{"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}"#;

/// What a picture should end in.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Refused,
    Read,
    /// Either, within the bounds.
    Any,
}
use End::{Any, Read, Refused};

type Case = (String, End, Vec<u8>);

/// Pictures under construction.
#[derive(Default)]
struct Cases(Vec<Case>);

impl Cases {
    fn add(&mut self, name: impl Into<String>, end: End, file: Vec<u8>) {
        self.0.push((name.into(), end, file));
    }
}

fn fixture(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/pictures");
    std::fs::read(folder.join(name)).expect("a fixture")
}

fn with(mut file: Vec<u8>, changes: &[(usize, &[u8])]) -> Vec<u8> {
    for (at, bytes) in changes {
        file[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    file
}

fn find(file: &[u8], pattern: &[u8]) -> usize {
    let found = file.windows(pattern.len()).position(|one| one == pattern);
    found.expect("the pattern")
}

fn chunk(kind: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut hash = !0_u32;
    let table: Vec<u32> = (0..256)
        .map(|byte: u32| {
            (0..8).fold(byte, |sum, _| {
                (sum >> 1) ^ if sum & 1 == 1 { 0xedb8_8320 } else { 0 }
            })
        })
        .collect();
    for byte in kind.iter().chain(data) {
        hash = (hash >> 8) ^ table[((hash ^ u32::from(*byte)) & 255) as usize];
    }
    let length = (data.len() as u32).to_be_bytes();
    [&length[..], kind, data, &(!hash).to_be_bytes()].concat()
}

const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";

fn png_of(chunks: &[Vec<u8>]) -> Vec<u8> {
    [SIGNATURE, &chunks.concat()].concat()
}

fn head(width: u32, height: u32, [depth, colour, interlace]: [u8; 3]) -> Vec<u8> {
    let sides = [width.to_be_bytes(), height.to_be_bytes()].concat();
    chunk(
        b"IHDR",
        &[&sides[..], &[depth, colour, 0, 0, interlace]].concat(),
    )
}

/// The compressed pixels of a black picture.
fn black(width: u32, height: u32, depth: BitDepth, colour: ColorType) -> Vec<u8> {
    let mut file = Vec::new();
    let mut encoder = Encoder::new(&mut file, width, height);
    encoder.set_color(colour);
    encoder.set_depth(depth);
    encoder.set_compression(Compression::Fast);
    encoder.set_filter(Filter::NoFilter);
    let mut writer = encoder.write_header().expect("a header");
    let mut stream = writer.stream_writer().expect("a stream");
    let bits = colour.samples() * depth as usize * width as usize;
    let row = vec![0; bits.div_ceil(8)];
    for _ in 0..height {
        std::io::Write::write_all(&mut stream, &row).expect("a row");
    }
    stream.finish().expect("an end");
    drop(writer);
    let (mut pixels, mut rest) = (Vec::new(), &file[SIGNATURE.len()..]);
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        if tail.starts_with(b"IDAT") {
            pixels.extend_from_slice(&tail[4..4 + length]);
        }
        rest = &tail[4 + length + 4..];
    }
    pixels
}

/// A small PNG with extra chunks before its pixels.
fn png_with(colour: u8, chunks: &[Vec<u8>]) -> Vec<u8> {
    let (kind, samples) = match colour {
        3 => (ColorType::Grayscale, chunk(b"PLTE", &[7; 9])),
        0 => (ColorType::Grayscale, Vec::new()),
        _ => (ColorType::Rgb, Vec::new()),
    };
    let pixels = chunk(b"IDAT", &black(40, 30, BitDepth::Eight, kind));
    let parts = [
        head(40, 30, [8, colour, 0]),
        samples,
        chunks.concat(),
        pixels,
        chunk(b"IEND", &[]),
    ];
    png_of(&parts)
}

fn png_bombs(cases: &mut Cases) {
    let end = || chunk(b"IEND", &[]);
    for (width, height) in [
        (100_000, 100_000),
        (0x7fff_ffff, 1),
        (1, 0x7fff_ffff),
        (u32::MAX, u32::MAX),
        (0, 5),
        (5, 0),
        (SIDE, SIDE + 1),
    ] {
        for pixels in [&b""[..], &[0x78, 0x9c, 3, 0]] {
            let parts = [
                head(width, height, [8, 2, 0]),
                chunk(b"IDAT", pixels),
                end(),
            ];
            let name = format!("png {width} x {height}, {} bytes", pixels.len());
            cases.add(name, Refused, png_of(&parts));
        }
    }
    // A gigabyte of zeros, as text, profile and pixels.
    let giga = black(1 << 15, 1 << 15, BitDepth::Eight, ColorType::Grayscale);
    let parts = [head(1, 1, [8, 0, 0]), chunk(b"IDAT", &giga), end()];
    cases.add("png of one pixel with a gigabyte", Any, png_of(&parts));
    let named = |name: &[u8]| [name, &giga].concat();
    for (name, kind, data) in [
        ("profile", b"iCCP", named(b"icc\0\0")),
        ("text", b"zTXt", named(b"Comment\0\0")),
        ("xmp", b"iTXt", named(b"XML:com.adobe.xmp\0\x01\0\0\0")),
        ("exif in text", b"zTXt", named(b"Raw profile type exif\0\0")),
    ] {
        let file = png_with(2, &[chunk(kind, &data)]);
        cases.add(format!("png with a gigabyte of {name}"), Any, file);
    }
    for (name, colour, kind, bytes) in [
        ("tRNS of a palette", 3, b"tRNS", 20 << 20),
        ("tRNS of RGB", 2, b"tRNS", 20 << 20),
        ("tRNS of grey", 0, b"tRNS", 20 << 20),
        ("palette", 3, b"PLTE", 3 << 20),
        ("plain text", 2, b"tEXt", 70 << 20),
        ("unknown chunk", 2, b"prVt", 70 << 20),
        ("critical chunk", 2, b"PRVT", 1 << 20),
        ("eXIf", 2, b"eXIf", 30 << 20),
    ] {
        let file = png_with(colour, &[chunk(kind, &vec![b'a'; bytes])]);
        cases.add(format!("png with a giant {name}"), Any, file);
    }
    let xmp = [
        &b"XML:com.adobe.xmp\0\0\0\0\0"[..],
        &b"tiff:Orientation".repeat(2 << 20),
    ]
    .concat();
    let file = png_with(2, &[chunk(b"iTXt", &xmp)]);
    cases.add("png with 32 MB of XMP", Any, file);
    let file = png_with(2, &[chunk(b"prVt", &[]).repeat(1_000_000)]);
    cases.add("png with a million chunks", Any, file);
    let file = png_with(2, &[chunk(b"IDAT", &[]).repeat(1_000_000)]);
    cases.add("png with a million empty pixels", Any, file);
    let frame = chunk(b"fcTL", &[0; 26]);
    let file = png_with(
        2,
        &[
            chunk(b"acTL", &[0, 1, 0x86, 0xa0, 0, 0, 0, 0]),
            frame.repeat(100_000),
        ],
    );
    cases.add("png of 100,000 frames", Any, file);
    for length in [u32::MAX, 0x7fff_ffff, 0x8000_0000] {
        let mut file = png_of(&[head(9, 9, [8, 2, 0])]);
        file.extend_from_slice(&length.to_be_bytes());
        file.extend_from_slice(b"IDAT 12");
        cases.add(format!("png with a chunk of {length} bytes"), Refused, file);
    }
    for (name, parts) in [
        ("without pixels", vec![head(9, 9, [8, 2, 0]), end()]),
        ("of an end", vec![end()]),
        (
            "with two headers",
            vec![head(9, 9, [8, 2, 0]), head(99, 9, [8, 2, 0]), end()],
        ),
        ("of depth 3", vec![head(9, 9, [3, 2, 0]), end()]),
        ("of colour 1", vec![head(9, 9, [8, 1, 0]), end()]),
        ("interlaced by 7", vec![head(9, 9, [8, 2, 7]), end()]),
        (
            "of no stream",
            vec![head(9, 9, [8, 2, 0]), chunk(b"IDAT", &[1; 4096]), end()],
        ),
        (
            "of a palette that lacks",
            vec![head(9, 9, [8, 3, 0]), chunk(b"IDAT", &[1; 99]), end()],
        ),
    ] {
        cases.add(format!("png {name}"), Refused, png_of(&parts));
    }
}

/// Pictures at the limit, which take time.
fn large(cases: &mut Cases) {
    for (name, bits, colour, kind, depth) in [
        ("RGB", 8, 2, ColorType::Rgb, BitDepth::Eight),
        ("RGBA of 16 bits", 16, 6, ColorType::Rgba, BitDepth::Sixteen),
        ("grey of a bit", 1, 0, ColorType::Grayscale, BitDepth::One),
    ] {
        let pixels = chunk(b"IDAT", &black(SIDE, SIDE, depth, kind));
        let parts = [
            head(SIDE, SIDE, [bits, colour, 0]),
            pixels,
            chunk(b"IEND", &[]),
        ];
        cases.add(format!("png of {SIDE}, {name}"), Read, png_of(&parts));
    }
    let interlaced = black(SIDE, SIDE + SIDE / 8, BitDepth::Eight, ColorType::Rgb);
    let parts = [head(SIDE, SIDE, [8, 2, 1]), chunk(b"IDAT", &interlaced)];
    cases.add("png at the limit, interlaced", Any, png_of(&parts));
    for (name, side, progressive, [h, v], end) in [
        ("baseline", SIDE, false, [1, 1], Read),
        ("progressive at the limit", SIDE, true, [1, 1], Refused),
        (
            "progressive 4:2:0 at the limit",
            SIDE,
            true,
            [2, 2],
            Refused,
        ),
        ("progressive", 10_500, true, [1, 1], Read),
        ("progressive 4:2:0", 12_900, true, [2, 2], Read),
    ] {
        let file = jpeg(side, side, progressive, [h, v], 1);
        cases.add(format!("jpeg of {side}, {name}"), end, file);
    }
    for scans in [100, 30_000] {
        let file = jpeg(4000, 3000, true, [1, 1], scans);
        cases.add(
            format!("jpeg of 12 million pixels, {scans} scans"),
            Any,
            file,
        );
    }
    cases.add(
        "gif at the limit",
        Any,
        gif(SIDE as u16, SIDE as u16, &lzw_zeros(SIDE)),
    );
    let side = 12_000;
    let rows = side * side;
    let bmp = [&bmp(side, side, 24, 0, 40)[..], &vec![9; 3 * rows as usize]].concat();
    cases.add("bmp of 144 million pixels", Any, bmp);
}

/// A JPEG segment.
fn segment(code: u8, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u16 + 2).to_be_bytes();
    [&[0xff, code], &length[..], data].concat()
}

/// Tables of one code each, of one bit: 0 stands for no coefficient, or for runs of 2^14 blocks.
fn jpeg_tables(ac: u8) -> Vec<u8> {
    let mut codes = [0; 17];
    codes[1] = 1;
    let dc = [&codes[..], &[0]].concat();
    codes[0] = 0x10;
    let ac = [&codes[..], &[ac]].concat();
    let quant = [&[0][..], &[1; 64]].concat();
    [
        segment(0xdb, &quant),
        segment(0xc4, &dc),
        segment(0xc4, &ac),
    ]
    .concat()
}

fn frame(code: u8, width: u16, height: u16, factors: [u8; 2]) -> Vec<u8> {
    let [w, h] = [width.to_be_bytes(), height.to_be_bytes()];
    let first = factors[0] << 4 | factors[1];
    let parts = [&[8][..], &h, &w, &[3, 1, first, 0, 2, 0x11, 0, 3, 0x11, 0]];
    segment(code, &parts.concat())
}

/// A grey picture in three colours: its first coefficients and, if progressive, `scans` more scans.
fn jpeg(width: u32, height: u32, progressive: bool, [h, v]: [u8; 2], scans: usize) -> Vec<u8> {
    let units = [
        width.div_ceil(8 * u32::from(h)),
        height.div_ceil(8 * u32::from(v)),
    ];
    let blocks = units[0] as usize * units[1] as usize * (usize::from(h * v) + 2);
    let code = if progressive { 0xc2 } else { 0xc0 };
    let mut file = [
        vec![0xff, 0xd8],
        jpeg_tables(if progressive { 0xe0 } else { 0 }),
        frame(code, width as u16, height as u16, [h, v]),
    ]
    .concat();
    let last = if progressive { 0 } else { 63 };
    file.extend(segment(0xda, &[3, 1, 0, 2, 0, 3, 0, 0, last, 0]));
    let bits = if progressive { blocks } else { 2 * blocks };
    file.extend(vec![0; bits.div_ceil(8)]);
    if progressive {
        let runs = blocks.div_ceil(1 << 14);
        for scan in 0..scans {
            // The same coefficients again and again.
            file.extend(segment(0xda, &[1, 1 + (scan % 3) as u8, 0, 1, 63, 0]));
            file.extend(vec![0; (15 * runs).div_ceil(8)]);
        }
    }
    file.extend([0xff, 0xd9]);
    file
}

/// A small JPEG with extra segments after its first marker.
fn jpeg_with(segments: &[u8]) -> Vec<u8> {
    let plain = fixture("444.jpg");
    [&plain[..2], segments, &plain[2..]].concat()
}

fn exif(directory: &[u8]) -> Vec<u8> {
    let tiff = b"Exif\0\0II*\0\x08\0\0\0";
    segment(0xe1, &[&tiff[..], directory].concat())
}

fn jpeg_bombs(cases: &mut Cases) {
    let plain = fixture("444.jpg");
    let at = find(&plain, &[0xff, 0xc0]) + 5;
    for (w, h) in [(65_500, 65_500), (65_535, 65_535), (0, 0), (0, 9), (9, 0)] {
        let sides = [u16::to_be_bytes(h), u16::to_be_bytes(w)].concat();
        let file = with(plain.clone(), &[(at, &sides)]);
        cases.add(format!("jpeg {w} x {h}"), Refused, file);
    }
    for (w, h) in [(65_535, 1), (1, 65_535), (65_500, 2700)] {
        let sides = [u16::to_be_bytes(h), u16::to_be_bytes(w)].concat();
        let file = with(plain.clone(), &[(at, &sides)]);
        cases.add(format!("jpeg {w} x {h}"), Any, file);
    }
    for factors in [0x00, 0x44, 0xff, 0x13, 0x31] {
        let file = with(plain.clone(), &[(at + 6, &[factors])]);
        cases.add(format!("jpeg sampled by {factors:#x}"), Any, file);
    }
    for (name, code) in [
        ("lossless", 0xc3),
        ("arithmetic", 0xc9),
        ("hierarchical", 0xc5),
    ] {
        let file = with(plain.clone(), &[(at - 4, &[code])]);
        cases.add(format!("jpeg {name}"), Refused, file);
    }
    let file = with(plain.clone(), &[(at - 1, &[12])]);
    cases.add("jpeg of 12 bits", Refused, file);
    let again = [&plain[at - 5..at + 14], &plain[2..]].concat();
    cases.add(
        "jpeg of two frames",
        Refused,
        [&plain[..2], &again].concat(),
    );
    // Tag 0x0112 as a LONG, at the end of a directory that says it has many.
    let entries = [&[0xff; 2][..], &[0x12, 1, 4, 0, 1, 0, 0, 0, 8, 0, 0, 0]].concat();
    let loops = [&[1, 0, 0x69, 0x87, 4, 0, 1, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0, 0][..]].concat();
    let pointer = b"Exif\0\0II*\0\xff\xff\xff\xff";
    for (name, part) in [
        ("an endless directory", exif(&entries)),
        ("a directory in itself", exif(&loops)),
        ("full directories", exif(&[0xff; 60_000])),
        ("a directory beyond its end", segment(0xe1, pointer)),
        ("10,000 EXIF segments", exif(&entries).repeat(10_000)),
        ("30 MB of EXIF", exif(&[0xff; 65_000]).repeat(480)),
        ("a million comments", segment(0xfe, &[]).repeat(1_000_000)),
        ("100,000 tables", jpeg_tables(0).repeat(100_000)),
        ("100 MB of zeros", vec![0; 100 << 20]),
        ("100 MB of fill", vec![0xff; 100 << 20]),
        ("a million restarts", [0xff, 0xd3].repeat(1_000_000)),
        ("60 MB of profiles", segment(0xe2, &[1; 65_000]).repeat(960)),
        ("60 MB of XMP", {
            let start = b"http://ns.adobe.com/xap/1.0/\0";
            let text = b"tiff:Orientation".repeat(4000);
            segment(0xe1, &[&start[..], &text].concat()).repeat(960)
        }),
    ] {
        cases.add(format!("jpeg with {name}"), Any, jpeg_with(&part));
    }
    let file = with(plain.clone(), &[(at, &[0x20, 0, 0x20, 0])]);
    let restarts = [&file[..2], &segment(0xdd, &[0, 1]), &file[2..]].concat();
    cases.add("jpeg that restarts at each unit", Any, restarts);
    let at = find(&plain, &[0xff, 0xda]);
    cases.add("jpeg without a scan", Refused, plain[..at].to_vec());
    let bands = jpeg(64, 64, true, [1, 1], 1);
    let at = find(&bands, &[0xff, 0xda]) + 11;
    for band in [
        [0, 64, 0],
        [9, 3, 0],
        [0, 0, 0xff],
        [1, 255, 0],
        [0, 0, 0x31],
    ] {
        let file = with(bands.clone(), &[(at, &band)]);
        cases.add(format!("jpeg with band {band:?}"), Any, file);
    }
    cases.add(
        "jpeg of 3,000 scans",
        Any,
        jpeg(200, 200, true, [1, 1], 3000),
    );
    cases.add(
        "jpeg of 100,000 scans",
        Refused,
        jpeg(1000, 1000, true, [1, 1], 100_000),
    );
}

/// A GIF of one frame with given blocks of pixels.
fn gif(width: u16, height: u16, blocks: &[u8]) -> Vec<u8> {
    let sides = [width.to_le_bytes(), height.to_le_bytes()].concat();
    let parts = [b"GIF89a", &sides[..], &[0x80, 0, 0, 1, 2, 3, 4, 5, 6]];
    let frame = [&[b',', 0, 0, 0, 0][..], &sides, &[0, 2], blocks, &[0, b';']];
    [parts.concat(), frame.concat()].concat()
}

/// Blocks of pixels of index 0 that are as short as codes can be, for a square.
fn lzw_zeros(side: u32) -> Vec<u8> {
    let (mut bits, mut codes, mut pixels) = (Vec::new(), 6_u32, 0_u64);
    let mut put = |code: u32, width: u32| bits.extend((0..width).map(|bit| code >> bit & 1 == 1));
    put(4, 3);
    put(0, 3);
    let (mut width, mut length) = (3, 1_u64);
    while pixels < u64::from(side) * u64::from(side) {
        pixels += length;
        // Each code stands for one zero more than the one before.
        if codes < 4096 {
            put(codes, width);
            codes += 1;
            length += 1;
            if codes == 1 << width && width < 12 {
                width += 1;
            }
        } else {
            put(4095, 12);
        }
    }
    let bytes = bits.chunks(8).map(|eight| {
        eight
            .iter()
            .rev()
            .fold(0, |byte, &bit| byte << 1 | u8::from(bit))
    });
    let bytes: Vec<u8> = bytes.collect();
    let blocks = bytes.chunks(255);
    blocks
        .flat_map(|block| [&[block.len() as u8], block].concat())
        .collect()
}

fn gif_bombs(cases: &mut Cases) {
    let plain = fixture("palette.gif");
    let frame = find(&plain, b",\0\0\0\0");
    for (w, h) in [(65_535_u16, 65_535_u16), (0, 0), (65_535, 1)] {
        let sides = [w.to_le_bytes(), h.to_le_bytes()].concat();
        cases.add(format!("gif {w} x {h}"), Any, gif(w, h, &[]));
        let file = with(plain.clone(), &[(frame + 5, &sides)]);
        cases.add(format!("gif with a frame of {w} x {h}"), Any, file);
    }
    let file = with(plain.clone(), &[(frame + 1, &[0xff; 4])]);
    cases.add("gif with a frame far away", Refused, file);
    let [start, body] = [&plain[..frame], &plain[frame..plain.len() - 1]];
    let file = [start, &body.repeat(100_000), b";"].concat();
    cases.add("gif of 100,000 frames", Read, file);
    let comment = [&[b'!', 0xfe, 255][..], &[b'a'; 255], &[0]].concat();
    let file = [start, &comment.repeat(200_000), body, b";"].concat();
    cases.add("gif with 50 MB of comments", Any, file);
    let block = [&[255][..], &[b'a'; 255]].concat().repeat(200_000);
    let file = [start, &[b'!', 0xfe], &block].concat();
    cases.add("gif with a comment without an end", Refused, file);
    for bits in [0, 1, 12, 255] {
        let file = with(plain.clone(), &[(frame + 10, &[bits])]);
        cases.add(format!("gif with codes of {bits} bits"), Any, file);
    }
    cases.add("gif without a frame", Refused, [start, b";"].concat());
}

/// A WebP file of chunks.
fn webp(chunks: &[(&[u8; 4], &[u8])]) -> Vec<u8> {
    let mut body = b"WEBP".to_vec();
    for (kind, data) in chunks {
        body.extend_from_slice(*kind);
        body.extend_from_slice(&(data.len() as u32).to_le_bytes());
        body.extend_from_slice(data);
        body.extend(vec![0; data.len() % 2]);
    }
    [b"RIFF", &(body.len() as u32).to_le_bytes()[..], &body].concat()
}

fn webp_bombs(cases: &mut Cases) {
    let lossless = fixture("lossless.webp");
    let lossy = fixture("lossy.webp");
    let pixels = &lossless[20..];
    let canvas = |flags: u8, width: u32, height: u32| {
        let sides = [width - 1, height - 1].map(|side| side.to_le_bytes());
        [&[flags, 0, 0, 0], &sides[0][..3], &sides[1][..3]].concat()
    };
    let file = with(lossless.clone(), &[(21, &[0xff; 4])]);
    cases.add("webp of version 7", Refused, file);
    let file = with(lossless.clone(), &[(21, &[0xff, 0xff, 0xff, 0x0f])]);
    cases.add("webp of 16384", Refused, file);
    let file = with(lossless.clone(), &[(21, &0x0d0f_f43f_u32.to_le_bytes())]);
    cases.add("webp of 13,376 pixels a side", Any, file);
    let at = find(&lossy, &[0x9d, 1, 0x2a]) + 3;
    let file = with(lossy.clone(), &[(at, &[0xff, 0x3f, 0xff, 0x3f])]);
    cases.add("webp, lossy, of 16383", Refused, file.clone());
    let huge = &file[20..];
    for (name, parts) in [
        (
            "a huge canvas",
            vec![
                (b"VP8X", canvas(0, 1 << 24, 1 << 24)),
                (b"VP8L", pixels.to_vec()),
            ],
        ),
        (
            "another canvas",
            vec![(b"VP8X", canvas(0, 9, 9)), (b"VP8L", pixels.to_vec())],
        ),
        (
            "a huge picture",
            vec![(b"VP8X", canvas(0, 9, 9)), (b"VP8 ", huge.to_vec())],
        ),
        (
            "a giant profile",
            vec![
                (b"VP8X", canvas(0x20, 48, 36)),
                (b"ICCP", vec![1; 100 << 20]),
                (b"VP8L", pixels.to_vec()),
            ],
        ),
        (
            "giant EXIF",
            vec![
                (b"VP8X", canvas(8, 48, 36)),
                (b"VP8L", pixels.to_vec()),
                (b"EXIF", vec![b'I'; 100 << 20]),
            ],
        ),
        (
            "giant XMP",
            vec![
                (b"VP8X", canvas(4, 48, 36)),
                (b"VP8L", pixels.to_vec()),
                (b"XMP ", b"tiff:Orientation".repeat(3 << 20)),
            ],
        ),
        ("no pixels", vec![(b"VP8X", canvas(0, 48, 36))]),
        (
            "no frames",
            vec![(b"VP8X", canvas(2, 48, 36)), (b"ANIM", vec![0; 6])],
        ),
    ] {
        let parts: Vec<(&[u8; 4], &[u8])> = parts
            .iter()
            .map(|(kind, data)| (*kind, &data[..]))
            .collect();
        cases.add(format!("webp with {name}"), Any, webp(&parts));
    }
    let animated = fixture("animated.webp");
    let first = find(&animated, b"ANMF");
    let length = u32::from_le_bytes(animated[first + 4..first + 8].try_into().expect("four"));
    let frame = &animated[first..first + 8 + length as usize + length as usize % 2];
    let mut file = [&animated[..first], &frame.repeat(100_000)].concat();
    let size = (file.len() as u32 - 8).to_le_bytes();
    file[4..8].copy_from_slice(&size);
    cases.add("webp of 100,000 frames", Read, file);
    for size in [0, 4, u32::MAX] {
        let file = with(lossless.clone(), &[(4, &size.to_le_bytes())]);
        cases.add(format!("webp of {size} bytes"), Any, file);
        let exif = fixture("exif_6.webp");
        let at = find(&exif, b"EXIF") + 4;
        let file = with(exif, &[(at, &size.to_le_bytes())]);
        cases.add(format!("webp with EXIF of {size} bytes"), Any, file);
    }
}

/// The header of a BMP, after which its pixels begin.
fn bmp(width: u32, height: u32, bits: u16, coding: u32, header: u32) -> Vec<u8> {
    let numbers = |numbers: &[u32]| -> Vec<u8> {
        numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect()
    };
    let mut file = [b"BM".to_vec(), numbers(&[0, 0, 54, header, width, height])].concat();
    file.extend([1, 0]);
    file.extend(bits.to_le_bytes());
    file.extend(numbers(&[coding, 0, 0, 0, 0, 0]));
    file
}

fn bmp_bombs(cases: &mut Cases) {
    for (width, height) in [
        (0x7fff_ffff, 0x7fff_ffff),
        (9, 0x8000_0000),
        (u32::MAX, 9),
        (0, 9),
        (60_000, 60_000),
        (13_000, 13_000),
    ] {
        for bits in [1, 8, 24, 32] {
            let name = format!("bmp {width} x {height} of {bits} bits");
            cases.add(name, Refused, bmp(width, height, bits, 0, 40));
        }
    }
    for bits in [0, 3, 7, 64, 0xffff] {
        let file = [bmp(9, 9, bits, 0, 40), vec![0; 4096]].concat();
        cases.add(format!("bmp of {bits} bits"), Refused, file);
    }
    for header in [0, 11, 13, 1 << 20, u32::MAX] {
        let file = [bmp(9, 9, 24, 0, header), vec![0; 4096]].concat();
        cases.add(format!("bmp with a header of {header} bytes"), Any, file);
    }
    let file = with(
        [bmp(9, 9, 8, 0, 40), vec![0; 4096]].concat(),
        &[(46, &[0xff; 8])],
    );
    cases.add("bmp with 2^32 colours", Any, file);
    let file = with(
        [bmp(9, 9, 24, 0, 40), vec![0; 4096]].concat(),
        &[(10, &[0xff; 4])],
    );
    cases.add("bmp with pixels far away", Refused, file);
    for coding in [1, 2, 3, 4, 5, 77] {
        let bits = if coding == 2 { 4 } else { 8 };
        let jumps = [0, 2, 0, 255].repeat(100_000);
        let file = [bmp(13_000, 13_000, bits, coding, 40), jumps].concat();
        cases.add(format!("bmp of coding {coding} that jumps"), Any, file);
    }
}

/// All formats, cut off and with zeros for their end.
fn cut(cases: &mut Cases) {
    for name in [
        "rgb_8.png",
        "interlaced.png",
        "progressive.jpg",
        "cmyk.jpg",
        "palette.gif",
        "lossless.webp",
        "lossy_alpha.webp",
        "rgb_24.bmp",
        "rle_8.bmp",
    ] {
        let file = fixture(name);
        for part in [4, 9] {
            let half = &file[..file.len() * part / 10];
            cases.add(format!("{part} tenths of {name}"), Refused, half.to_vec());
        }
        let half = [&file[..file.len() / 2], &vec![0; 10 << 20]].concat();
        cases.add(format!("half of {name} and zeros"), Any, half);
    }
}

/// Encodes or checks a record with the picture `picture` of the folder in this process: a line of
/// its outcome, peak of memory in MiB and seconds.
fn outcome(folder: &Path, way: &str) -> String {
    let record = r#"{"messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "That."}], "images": ["picture"]}"#;
    let encoder = SampleEncoder::from_folder(folder, SampleOptions::default());
    let encoder = encoder.expect("an encoder");
    let mut records = Conversations::new(record.as_bytes(), folder, &FileOptions::default());
    let read = if way == WAYS[0] {
        let conversation = records.next().expect("a record").expect("a conversation");
        let sample = encoder.encode(&conversation);
        sample.map(drop).map_err(|error| error.to_string())
    } else {
        let options = CheckOptions {
            threads: 1,
            pixels: true,
        };
        let report = check_data(records, &encoder, options, &|_, _| ());
        let mut errors = report.findings.iter();
        match errors.find(|found| found.severity == Severity::Error) {
            None => Ok(()),
            Some(found) => Err(found.examples[0].message.clone()),
        }
    };
    let told = match read {
        Ok(()) => "read",
        Err(error) if error.contains('\n') || error.len() > 1000 => "long",
        Err(_) => "refused",
    };
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak: u64 = peak
        .and_then(|peak| peak.trim().trim_end_matches(" kB").parse().ok())
        .expect("a peak");
    // The name is in brackets; ticks of a hundredth of a second in user and kernel mode.
    let stat = std::fs::read_to_string("/proc/self/stat").expect("a state");
    let (_, stat) = stat.rsplit_once(')').expect("a name");
    let ticks = stat.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks
        .map(|ticks| ticks.parse::<f64>().expect("a number"))
        .sum();
    format!("OUTCOME {told} {} {}", peak / 1024, ticks / 100.0)
}

/// The process of a picture.
#[test]
#[ignore = "is started by the tests below"]
fn child() {
    if let (Ok(path), Ok(way)) = (std::env::var(VARIABLE), std::env::var(WAY)) {
        println!("\n{}", outcome(Path::new(&path), &way));
    }
}

/// Runs all cases and returns their largest peak and time.
fn run(cases: Vec<Case>, folder: &str) -> (usize, u64, f64) {
    let folder = family_folder("qwen3", folder);
    folder.write("preprocessor_config.json", PROCESSOR);
    let path = folder.0.join("picture");
    let (count, mut wrong) = (cases.len(), Vec::new());
    let (mut largest, mut longest) = (0, 0.0_f64);
    for (name, end, file, way) in cases
        .iter()
        .flat_map(|(name, end, file)| WAYS.map(|way| (name, *end, file, way)))
    {
        std::fs::write(&path, file).expect("a file");
        let this = std::env::current_exe().expect("a name");
        let arguments = ["child", "--exact", "--ignored", "--nocapture"];
        let ran = Command::new(this)
            .args(arguments)
            .env(VARIABLE, &folder.0)
            .env(WAY, way)
            .output();
        let ran = ran.expect("a process");
        let text = String::from_utf8_lossy(&ran.stdout);
        let line = text.lines().find_map(|line| line.strip_prefix("OUTCOME "));
        let Some([told, peak, seconds]) =
            line.and_then(|line| <[&str; 3]>::try_from(line.split(' ').collect::<Vec<_>>()).ok())
        else {
            wrong.push(format!(
                "{name}, {way}: {}",
                String::from_utf8_lossy(&ran.stderr)
            ));
            continue;
        };
        let (peak, seconds): (u64, f64) = (peak.parse().expect("MiB"), seconds.parse().expect("s"));
        println!("{name}, {way}: {told}, {peak} MiB, {seconds} s");
        let expected = match end {
            Refused => ["refused"; 2],
            Read => ["read"; 2],
            Any => ["refused", "read"],
        };
        if !expected.contains(&told) || peak > MAX_MIB || seconds > MAX_SECONDS {
            wrong.push(format!(
                "{name}, {way}: {told}, {peak} MiB, {seconds} s; expected {end:?}"
            ));
        }
        (largest, longest) = (largest.max(peak), longest.max(seconds));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    (count, largest, longest)
}

#[test]
fn a_few_bombs_end_soon() {
    let mut cases = Cases::default();
    jpeg_bombs(&mut cases);
    cases.0.retain(|(_, _, file)| file.len() < 1 << 20);
    webp_bombs(&mut cases);
    cases.0.retain(|(_, _, file)| file.len() < 1 << 20);
    let some = cases.0.into_iter().step_by(4).collect();
    run(some, "hostile-few");
}

#[test]
#[ignore = "makes pictures of gigabytes; cargo test --release -p vlm-data --test hostile -- --ignored all"]
fn all_bombs_end_in_time_and_memory() {
    let mut cases = Cases::default();
    for make in [
        png_bombs, jpeg_bombs, gif_bombs, webp_bombs, bmp_bombs, cut, large,
    ] {
        make(&mut cases);
    }
    let (count, largest, longest) = run(cases.0, "hostile-all");
    println!("{count} pictures: at most {largest} MiB and {longest} s of processor time");
    assert!(count >= 100, "{count} pictures");
}
