//! What pages of Parquet and buffers of Arrow are compressed with.

use crate::Error;
use flate2::read::MultiGzDecoder;
use lz4_flex::frame::FrameDecoder;
use ruzstd::decoding::StreamingDecoder;
use std::io::{self, BufReader, Read};

/// A format of compressed bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Codec {
    Plain,
    Snappy,
    Gzip,
    /// A block of LZ4, without a header.
    Lz4Block,
    /// Blocks of LZ4 with headers.
    Lz4Frame,
    Zstd,
}

/// Bytes of a snappy stream make at most this many: 3 bytes copy 64.
const SNAPPY_RATIO: usize = 22;
/// A byte of an LZ4 block makes at most this many: it lengthens a copy by 255.
const LZ4_RATIO: usize = 255;
/// Bytes that a tiny block may make beyond its ratio.
const SLACK: usize = 64;

impl Codec {
    /// All bytes, which should be `size`. Memory is at most that size, and in proportion to what
    /// the bytes inflate to.
    pub(crate) fn inflate(self, bytes: &[u8], size: usize) -> Result<Vec<u8>, Error> {
        let inflated = match self {
            Codec::Plain => bytes.to_vec(),
            Codec::Snappy => {
                let possible = size / SNAPPY_RATIO <= bytes.len() + SLACK;
                if !possible || snap::raw::decompress_len(bytes).ok() != Some(size) {
                    return Err(wrong_size(size));
                }
                let mut decoder = snap::raw::Decoder::new();
                decoder
                    .decompress_vec(bytes)
                    .map_err(|e| Error::File(format!("a page is damaged: {e}")))?
            }
            Codec::Lz4Block => {
                if size / LZ4_RATIO > bytes.len() + SLACK {
                    return Err(wrong_size(size));
                }
                lz4_flex::block::decompress(bytes, size)
                    .map_err(|e| Error::File(format!("a page is damaged: {e}")))?
            }
            Codec::Gzip | Codec::Lz4Frame | Codec::Zstd => {
                let mut inflated = vec![];
                // One byte more tells that there are more.
                let mut stream = self.stream(bytes)?.take(size as u64 + 1);
                stream.read_to_end(&mut inflated)?;
                inflated
            }
        };
        match inflated.len() == size {
            true => Ok(inflated),
            false => Err(wrong_size(size)),
        }
    }

    /// The bytes as a stream, in constant memory.
    pub(crate) fn stream<'a>(self, bytes: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Codec::Plain => Box::new(bytes),
            Codec::Gzip => Box::new(BufReader::new(MultiGzDecoder::new(bytes))),
            Codec::Lz4Frame => Box::new(BufReader::new(FrameDecoder::new(bytes))),
            Codec::Zstd => {
                let decoder = StreamingDecoder::new(bytes).map_err(io::Error::other)?;
                Box::new(BufReader::new(decoder))
            }
            Codec::Snappy | Codec::Lz4Block => {
                return Err(io::Error::other("a block is not a stream"));
            }
        })
    }
}

fn wrong_size(size: usize) -> Error {
    Error::File(format!(
        "a page is damaged: it should inflate to {size} bytes, and does not"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn pages_inflate_to_their_stated_sizes() {
        let zeros = vec![0; 1 << 24];
        let mut gzip = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
        gzip.write_all(&zeros).unwrap();
        let mut frame = lz4_flex::frame::FrameEncoder::new(vec![]);
        frame.write_all(&zeros).unwrap();
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        for (codec, bytes) in [
            (Codec::Plain, zeros.clone()),
            (Codec::Gzip, gzip.finish().unwrap()),
            (
                Codec::Zstd,
                ruzstd::encoding::compress_to_vec(&*zeros, level),
            ),
            (
                Codec::Snappy,
                snap::raw::Encoder::new().compress_vec(&zeros).unwrap(),
            ),
            (Codec::Lz4Block, lz4_flex::block::compress(&zeros)),
            (Codec::Lz4Frame, frame.finish().unwrap()),
        ] {
            assert_eq!(codec.inflate(&bytes, zeros.len()).unwrap(), zeros);
            for size in [0, 10, zeros.len() - 1, zeros.len() + 1, 1 << 31] {
                assert!(codec.inflate(&bytes, size).is_err(), "{codec:?} {size}");
            }
        }
    }
}
