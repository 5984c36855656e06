//! Decodes a `Content-Encoding` as the bytes arrive, so that what the sidecar must read can be read.
//!
//! Each push gives all that its input decides, so no event is held for bytes that come later. The output
//! of a push is bounded; a bound on the whole is the caller's.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};

/// Why a body can't be decoded. What was decoded before is good.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One push would give more than its bound: a body that is small only on the wire.
    #[error("a decoded chunk exceeds {0} bytes")]
    TooLarge(usize),
    /// Not of the coding that its label says.
    #[error("the body is not valid {coding}")]
    Invalid {
        /// The coding.
        coding: &'static str,
        /// What the decoder said.
        #[source]
        source: io::Error,
    },
    /// The body ended before its coding did.
    #[error("the {0} body is cut off")]
    CutOff(&'static str),
}

/// Decodes one body.
#[derive(Debug)]
pub struct Decoder {
    coding: &'static str,
    inflate: Inflate,
}

#[derive(Debug)]
enum Inflate {
    Gzip {
        decoder: Box<MultiGzDecoder<Bounded>>,
        begun: bool,
    },
    Zlib(Box<ZlibDecoder<Bounded>>),
    Raw(Box<DeflateDecoder<Bounded>>),
    /// `deflate` whose first two bytes are not both here: zlib by the standard, raw from some servers.
    Undecided(Option<u8>),
}

impl Decoder {
    /// For one value of `Content-Encoding` (RFC 9110 § 8.4.1): `gzip`, `x-gzip` or `deflate`, in any case.
    /// `None` for any other, a list of several included.
    pub fn new(coding: &str) -> Option<Self> {
        let coding = coding.trim();
        if coding.eq_ignore_ascii_case("gzip") || coding.eq_ignore_ascii_case("x-gzip") {
            let decoder = Box::new(MultiGzDecoder::new(Bounded::default()));
            Some(Self { coding: "gzip", inflate: Inflate::Gzip { decoder, begun: false } })
        } else if coding.eq_ignore_ascii_case("deflate") {
            Some(Self { coding: "deflate", inflate: Inflate::Undecided(None) })
        } else {
            None
        }
    }

    /// Decodes the next chunk: everything that can be known from the bytes so far, at most `max` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] beyond `max` (at most 32 KiB more were decoded), [`Error::Invalid`]. The decoder
    /// is of no use after either.
    pub fn push(&mut self, chunk: &[u8], max: usize) -> Result<Bytes, Error> {
        if chunk.is_empty() {
            return Ok(Bytes::new());
        }
        let decoded = match &mut self.inflate {
            Inflate::Gzip { decoder, begun } => {
                *begun = true;
                inflate(&mut **decoder, MultiGzDecoder::get_mut, chunk, max)
            }
            Inflate::Zlib(decoder) => inflate(&mut **decoder, ZlibDecoder::get_mut, chunk, max),
            Inflate::Raw(decoder) => inflate(&mut **decoder, DeflateDecoder::get_mut, chunk, max),
            Inflate::Undecided(first) => {
                let begin = [first.as_slice(), chunk].concat();
                let [cmf, flags, ..] = begin[..] else {
                    *first = Some(chunk[0]);
                    return Ok(Bytes::new());
                };
                // RFC 1950 § 2.2: method 8, and a header that is a multiple of 31.
                let zlib = cmf & 0x0f == 8 && u16::from_be_bytes([cmf, flags]).is_multiple_of(31);
                self.inflate = if zlib {
                    Inflate::Zlib(Box::new(ZlibDecoder::new(Bounded::default())))
                } else {
                    Inflate::Raw(Box::new(DeflateDecoder::new(Bounded::default())))
                };
                return self.push(&begin, max);
            }
        };
        decoded.map_err(|error| match error {
            None => Error::TooLarge(max),
            Some(source) => Error::Invalid { coding: self.coding, source },
        })
    }

    /// The body ended. Nothing is left to give: each push gave all it could.
    ///
    /// # Errors
    ///
    /// [`Error::CutOff`] when the coding has not ended, or does not match its own checksum.
    pub fn finish(&mut self) -> Result<(), Error> {
        let ended = match &mut self.inflate {
            // A body of no bytes at all is an empty one, whatever its label.
            Inflate::Gzip { begun: false, .. } | Inflate::Undecided(None) => Ok(()),
            Inflate::Undecided(Some(_)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Inflate::Gzip { decoder, .. } => decoder.try_finish(),
            Inflate::Zlib(decoder) => decoder.try_finish(),
            Inflate::Raw(decoder) => decoder.try_finish(),
        };
        ended.map_err(|_| Error::CutOff(self.coding))
    }
}

/// Feeds a chunk and takes what it decides. The error is `None` when that is more than `max` bytes.
fn inflate<D: Write>(
    decoder: &mut D,
    output: impl Fn(&mut D) -> &mut Bounded,
    mut chunk: &[u8],
    max: usize,
) -> Result<Bytes, Option<io::Error>> {
    output(decoder).max = max;
    let outcome = loop {
        match decoder.write(chunk) {
            // The coding has ended; what follows it is nobody's.
            Ok(0) => break Ok(()),
            Ok(taken) => chunk = &chunk[taken..],
            Err(error) => break Err(error),
        }
        if chunk.is_empty() {
            break decoder.flush();
        }
    };
    let output = output(decoder);
    match outcome {
        Ok(()) => Ok(std::mem::take(&mut output.bytes).into()),
        Err(_) if output.full => Err(None),
        Err(error) => Err(Some(error)),
    }
}

/// Takes what is decoded, and no more than `max` bytes of it.
#[derive(Debug, Default)]
struct Bounded {
    bytes: Vec<u8>,
    max: usize,
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, decoded: &[u8]) -> io::Result<usize> {
        if decoded.len() > self.max.saturating_sub(self.bytes.len()) {
            self.full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(decoded);
        Ok(decoded.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use flate2::{
        Compression,
        write::{DeflateEncoder, GzEncoder, ZlibEncoder},
    };

    use super::*;

    const MAX: usize = 1 << 20;
    const CODINGS: [&str; 3] = ["gzip", "zlib", "raw"];

    /// The parts, each flushed so that it can be decoded before the next.
    fn encode(coding: &str, parts: &[&[u8]]) -> Vec<Vec<u8>> {
        fn all<E: Write>(
            mut encoder: E,
            parts: &[&[u8]],
            taken: impl Fn(&mut E) -> &mut Vec<u8>,
            end: impl Fn(E) -> Vec<u8>,
        ) -> Vec<Vec<u8>> {
            let mut encoded: Vec<_> = parts
                .iter()
                .map(|part| {
                    encoder.write_all(part).unwrap();
                    encoder.flush().unwrap();
                    std::mem::take(taken(&mut encoder))
                })
                .collect();
            encoded.push(end(encoder));
            encoded
        }
        let level = Compression::default();
        match coding {
            "gzip" => all(GzEncoder::new(vec![], level), parts, GzEncoder::get_mut, |e| e.finish().unwrap()),
            "zlib" => {
                all(ZlibEncoder::new(vec![], level), parts, ZlibEncoder::get_mut, |e| e.finish().unwrap())
            }
            _ => all(DeflateEncoder::new(vec![], level), parts, DeflateEncoder::get_mut, |e| {
                e.finish().unwrap()
            }),
        }
    }

    fn decoder(coding: &str) -> Decoder {
        Decoder::new(if coding == "gzip" { "X-GZIP" } else { "Deflate" }).unwrap()
    }

    fn decode(coding: &str, chunks: &[&[u8]]) -> Result<Vec<u8>, Error> {
        let mut decoder = decoder(coding);
        let mut decoded = Vec::new();
        for chunk in chunks {
            decoded.extend_from_slice(&decoder.push(chunk, MAX)?);
        }
        decoder.finish()?;
        Ok(decoded)
    }

    const TEXT: &[u8] = b"data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n";

    #[test]
    fn every_coding_decodes_however_it_is_cut() {
        for coding in CODINGS {
            let body = encode(coding, &[TEXT]).concat();
            for cut in 0..=body.len() {
                let decoded = decode(coding, &[&body[..cut], &body[cut..]]).unwrap();
                assert_eq!(decoded, TEXT, "{coding} cut at {cut}");
            }
            let bytes: Vec<_> = body.chunks(1).collect();
            assert_eq!(decode(coding, &bytes).unwrap(), TEXT);
        }
    }

    #[test]
    fn each_event_is_given_as_soon_as_its_bytes_are_here() {
        for coding in CODINGS {
            let large = vec![b'x'; 100_000];
            let parts: [&[u8]; 4] = [b"data: 1\n\n", b"data: 2\n\n", &large, b"data: 3\n\n"];
            let mut decoder = decoder(coding);
            for (chunk, part) in encode(coding, &parts).iter().zip(parts) {
                assert_eq!(decoder.push(chunk, MAX).unwrap(), part, "{coding}");
            }
        }
    }

    #[test]
    fn a_bomb_is_stopped_at_the_bound() {
        for coding in CODINGS {
            let bomb = encode(coding, &[&vec![0; 10 << 20]]).concat();
            assert!(bomb.len() < 20_000);
            let mut small = decoder(coding);
            assert!(matches!(small.push(&bomb, 1 << 16), Err(Error::TooLarge(65536))), "{coding}");
            let mut exact = decoder(coding);
            assert_eq!(exact.push(&bomb, 10 << 20).unwrap().len(), 10 << 20);
        }
    }

    #[test]
    fn a_body_of_several_gzip_members_decodes_whole() {
        let body = [encode("gzip", &[b"one "]).concat(), encode("gzip", &[b"two"]).concat()].concat();
        for cut in 0..=body.len() {
            assert_eq!(decode("gzip", &[&body[..cut], &body[cut..]]).unwrap(), b"one two");
        }
    }

    #[test]
    fn a_body_that_is_cut_off_is_told_from_one_that_ended() {
        for coding in CODINGS {
            let body = encode(coding, &[TEXT]).concat();
            for cut in 1..body.len() {
                let cut_off = decode(coding, &[&body[..cut]]);
                assert!(matches!(cut_off, Err(Error::CutOff(_))), "{coding} cut at {cut}");
            }
            assert_eq!(decode(coding, &[]).unwrap(), b"");
        }
    }

    #[test]
    fn what_is_of_another_coding_is_invalid_and_never_a_panic() {
        for coding in CODINGS {
            for cut in 0..TEXT.len() {
                assert!(decode(coding, &[&TEXT[..cut], &TEXT[cut..], TEXT]).is_err(), "{coding} at {cut}");
            }
            let mut broken = encode(coding, &[&TEXT.repeat(50)]).concat();
            for at in 0..broken.len() {
                broken[at] ^= 0x55;
                let _ = decode(coding, &[&broken[..at], &broken[at..]]);
                broken[at] ^= 0x55;
            }
        }
    }

    #[test]
    fn a_coding_that_is_not_known_has_no_decoder() {
        for coding in ["br", "zstd", "identity", "", "gzip, gzip"] {
            assert!(Decoder::new(coding).is_none(), "{coding}");
        }
        assert!(Decoder::new(" GZip ").is_some());
    }
}
