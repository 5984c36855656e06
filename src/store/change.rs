//! Runs a change and checks what it decided, the same for every store.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Bounds, Change, Error, MAX_VALUE, Name, Table, View, Write};

/// How many live records each table holds.
pub(super) type Counts = [u64; Table::ALL.len()];

/// Lets `change` decide about `records`, which are what the store holds under `names`.
///
/// What comes back can be written as it is: one write a record, within every bound, and nothing put that has already
/// expired (that is a deletion).
///
/// # Errors
///
/// `Refused`: the change panicked or broke a rule. Nothing of it may be written.
pub(super) fn run(
    change: &mut Change,
    names: &[Name],
    records: &[Option<&[u8]>],
    now: u64,
    held: &Counts,
    bounds: &Bounds,
) -> Result<Vec<Write>, Error> {
    let absent = |table: Table| {
        names.iter().zip(records).filter(move |(name, is)| name.table == table && is.is_none())
    };
    let fits = |table: Table, new: usize| {
        let new = u64::try_from(new).unwrap_or(u64::MAX);
        bounds.records(table).is_none_or(|most| held[table.index()].saturating_add(new) <= most)
    };
    let room = |table: Table| fits(table, absent(table).count());
    let view = View { records, now, room: &room };
    // A panic must not take the store's thread with it, nor what others wait for there.
    let mut writes = catch_unwind(AssertUnwindSafe(|| change(&view)))
        .map_err(|_| Error::Refused("the change panicked"))?;
    if writes.len() != names.len() {
        return Err(Error::Refused("the change did not decide about each record"));
    }
    for write in &mut writes {
        if matches!(write, Write::Put { expires: Some(at), .. } if *at <= now) {
            *write = Write::Delete;
        }
        if matches!(write, Write::Put { value, .. } if value.len() > MAX_VALUE) {
            return Err(Error::Refused("a value exceeds 16777216 bytes"));
        }
    }
    for table in Table::ALL {
        let added = names.iter().zip(records).zip(&writes);
        let new = added
            .filter(|((name, is), write)| {
                name.table == table && is.is_none() && matches!(write, Write::Put { .. })
            })
            .count();
        if new > 0 && !fits(table, new) {
            return Err(Error::Refused("no room for a new record"));
        }
    }
    Ok(writes)
}
