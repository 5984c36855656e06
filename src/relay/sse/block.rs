//! The unfinished block of a stream, gathered from many chunks.
//!
//! One growing buffer would be copied at each growth, and both copies be there at once; so it grows by segments, which
//! are joined once, when the block is complete.

/// Bytes of a segment before the next one is begun.
const SEGMENT: usize = 256 * 1024;

/// What earlier chunks held of a block.
#[derive(Debug, Default)]
pub(super) struct Block {
    full: Vec<Vec<u8>>,
    last: Vec<u8>,
    length: usize,
}

impl Block {
    pub(super) fn len(&self) -> usize {
        self.length
    }

    pub(super) fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub(super) fn extend_from_slice(&mut self, part: &[u8]) {
        if !self.last.is_empty() && self.last.len() + part.len() > SEGMENT {
            self.full.push(std::mem::take(&mut self.last));
            self.last.reserve_exact(SEGMENT.max(part.len()));
        }
        self.last.extend_from_slice(part);
        self.length += part.len();
    }

    /// The whole, `tail` behind it; the block is empty then. Each segment is freed as it is copied.
    pub(super) fn take(&mut self, tail: &[u8]) -> Vec<u8> {
        let block = std::mem::take(self);
        if block.full.is_empty() {
            let mut whole = block.last;
            whole.extend_from_slice(tail);
            return whole;
        }
        let mut whole = Vec::with_capacity(block.length + tail.len());
        for segment in block.full.into_iter().chain([block.last]) {
            whole.extend_from_slice(&segment);
        }
        whole.extend_from_slice(tail);
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_what_was_put_into_it_however_large_its_parts() {
        for parts in [vec![3; 10], vec![SEGMENT - 1, 1, 1, 5], vec![3 * SEGMENT, 1, SEGMENT], vec![100; 9000]]
        {
            let mut block = Block::default();
            let mut whole = Vec::new();
            for (n, part) in parts.iter().enumerate() {
                let bytes = vec![u8::try_from(n % 251).unwrap(); *part];
                block.extend_from_slice(&bytes);
                whole.extend_from_slice(&bytes);
                assert_eq!(block.len(), whole.len());
            }
            whole.extend_from_slice(b"tail");
            assert!(block.take(b"tail") == whole);
            assert!(block.is_empty());
        }
    }
}
