use std::sync::Arc;

use super::*;
use crate::store::contract::{self, AMPLE, Place, get, put};

/// A store that all handles of one place share, on a clock that stands still.
struct Process {
    clock: Clock,
    store: std::sync::OnceLock<Arc<dyn Store>>,
}

impl Process {
    fn new() -> Self {
        Self { clock: Clock::manual(1_700_000_000_000), store: std::sync::OnceLock::new() }
    }
}

impl Place for Process {
    async fn open(&self, bounds: Bounds) -> Arc<dyn Store> {
        let open = || -> Arc<dyn Store> { Arc::new(Memory::new(bounds, self.clock.clone())) };
        self.store.get_or_init(open).clone()
    }

    async fn pass(&self, passed: u64) {
        self.clock.set(i64::try_from(millis(&self.clock) + passed).expect("small"));
    }
}

contract::every_test!(Process::new());

/// What the index by expiry says must always be what the records say.
#[tokio::test]
async fn its_books_stay_right_over_many_writes() {
    let clock = Clock::manual(1000);
    let store = Memory::new(Bounds { max_keys: 50, max_result_bytes: 2000 }, clock.clone());
    let mut random = fastrand::Rng::with_seed(7);
    for step in 0..20_000_i64 {
        let name = Name::new(Table::ALL[random.usize(..5)], random.u8(..40).to_string());
        let write = match random.u8(..10) {
            0 => Write::Delete,
            1 => Write::Put { value: vec![0; random.usize(..60)], expires: None },
            _ => {
                Write::Put { value: vec![0; random.usize(..60)], expires: Some(1000 + random.u64(..40_000)) }
            }
        };
        store.update(vec![name], Box::new(move |_| vec![write.clone()])).await.expect("there is room");
        clock.set(1000 + step * 2);
        let shelves = store.at(millis(&clock));
        for shelf in shelves.iter() {
            let live: Vec<_> = shelf.index.iter().map(|slot| &shelf.slots[*slot as usize]).collect();
            assert!(live.iter().all(|record| record.expires > millis(&clock)));
            assert_eq!(shelf.bytes, live.iter().map(|record| record.size()).sum::<u64>());
            assert_eq!(shelf.index.len() + shelf.free.len(), shelf.slots.len());
            assert!(shelf.by_expiry.len() <= 2 * live.len() + SWEEP + 1);
            assert!(shelf.by_age.as_ref().is_none_or(|by_age| by_age.len() == live.len()));
        }
    }
}

/// A lease that is renewed for days must not leave an entry for each renewal.
#[tokio::test]
async fn a_record_that_is_renewed_takes_no_more_than_one() {
    let clock = Clock::manual(0);
    let store = Memory::new(AMPLE, clock.clone());
    let name = Name::new(Table::Keys, "renewed");
    for step in 0..10_000_u64 {
        let write = Write::Put { value: vec![0; 100], expires: Some(step + 1_000_000 - step % 7 * 1000) };
        store.update(vec![name.clone()], Box::new(move |_| vec![write.clone()])).await.expect("put");
        clock.set(i64::try_from(step).expect("small"));
    }
    assert!(store.at(0)[0].by_expiry.len() <= SWEEP + 3);
}

#[tokio::test]
async fn a_change_that_panics_leaves_the_store_to_the_others() {
    let store = Arc::new(Memory::new(AMPLE, Clock::system()));
    let panics = store.update(vec![Name::new(Table::Keys, "a")], Box::new(|_| panic!("as a test")));
    assert!(panics.await.is_err());
    put(&*store, Name::new(Table::Keys, "a"), b"1").await.expect("put");
    assert_eq!(get(&*store, Name::new(Table::Keys, "a")).await, Some(b"1".to_vec()));
}
