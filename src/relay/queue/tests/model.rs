//! What must hold for any sequence of events, reads and waits, and the rules once more over a plain list.

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Progress { token: usize, rise: i32, size: usize, id: bool },
    NoNumber,
    Kept(usize),
    Final,
    Pop,
    Drain,
    Wait(u64),
}

fn steps(length: usize) -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..3_usize, -1..4_i32, 0..60_usize, prop::bool::weighted(0.1))
            .prop_map(|(token, rise, size, id)| Step::Progress { token, rise, size, id }),
        1 => Just(Step::NoNumber),
        2 => (0..90_usize).prop_map(Step::Kept),
        4 => Just(Step::Pop),
        1 => Just(Step::Drain),
        3 => (0..60_u64).prop_map(Step::Wait),
    ];
    let after = prop::collection::vec(step.clone(), 0..length / 4);
    (prop::collection::vec(step, 0..length), after).prop_map(|(mut steps, after)| {
        steps.push(Step::Final);
        steps.extend(after);
        steps
    })
}

fn any_settings() -> impl Strategy<Value = Settings> {
    let interval = prop::sample::select(vec![0, 20, 100]);
    (1..8_usize, 40..400_usize, 0..4_u32, interval, any::<bool>()).prop_map(
        |(queue, queue_bytes, burst, interval, coalesce)| Settings {
            queue,
            queue_bytes,
            burst,
            min_interval: millis(interval),
            coalesce,
            ..settings()
        },
    )
}

/// What was pushed.
#[derive(Clone, Copy, Debug, Default)]
struct Pushed {
    /// Its token and value, for progress that may be thinned or dropped.
    thin: Option<(usize, i32)>,
    /// Progress that is not forwarded.
    stale: bool,
    is_final: bool,
    id: bool,
}

/// Feeds steps to a queue, each event named by its number, and checks after each step what must hold then.
struct Run {
    queue: Queue,
    settings: Settings,
    now: Instant,
    values: [Option<i32>; 3],
    pushed: Vec<Pushed>,
    out: Vec<usize>,
}

impl Run {
    fn new(settings: Settings) -> Self {
        let queue = Queue::new(settings.clone());
        Self { queue, settings, now: Instant::now(), values: [None; 3], pushed: vec![], out: vec![] }
    }

    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Progress { token, rise, size, id } => self.progress(token, rise, size, id),
            Step::NoNumber => self.push(0, progress(0, None), Pushed::default()),
            Step::Kept(size) => self.push(size, Class::Kept, Pushed::default()),
            Step::Final => {
                while !self.queue.fits(100) {
                    self.pop()?;
                    self.now += millis(100);
                }
                self.push(0, Class::Final, Pushed { is_final: true, ..Pushed::default() });
            }
            Step::Pop => {
                self.pop()?;
            }
            Step::Drain => while self.pop()? {},
            Step::Wait(time) => self.now += millis(time),
        }
        let alone = self.queue.len() == 1;
        prop_assert!(self.queue.len() <= self.settings.queue || alone);
        prop_assert!(self.queue.bytes() <= self.settings.queue_bytes || alone);
        prop_assert!(!self.queue.is_empty() || self.queue.bytes() == 0);
        Ok(())
    }

    fn progress(&mut self, token: usize, rise: i32, size: usize, id: bool) {
        let newest = self.values[token];
        let value = newest.unwrap_or(0) + rise;
        let rises = newest.is_none_or(|newest| value > newest);
        let kept = !rises && id;
        let before = self.pushed.len();
        let pushed =
            Pushed { thin: (!kept).then_some((token, value)), stale: !rises && !kept, is_final: false, id };
        self.push(size, progress(token as u64, f64::from(value)), pushed);
        if rises && self.pushed.len() > before {
            self.values[token] = Some(value);
        }
    }

    fn push(&mut self, size: usize, class: Class, pushed: Pushed) {
        let event = event(&format!("{}{}", self.pushed.len(), " ".repeat(size)));
        let event = if pushed.id { with_id(event) } else { event };
        if self.queue.fits(super::size(&event)) {
            self.pushed.push(pushed);
            self.queue.push(event, class, self.now);
        }
    }

    fn pop(&mut self) -> Result<bool, TestCaseError> {
        let refetch = self.queue.counts().refetch;
        if let Some(Popped { event, refetch: mark, .. }) = self.queue.pop(self.now) {
            let number: usize = text(&event).trim_end().parse().unwrap();
            prop_assert_eq!(mark, self.pushed[number].is_final && refetch);
            self.out.push(number);
            return Ok(true);
        }
        let release = self.queue.next_release();
        prop_assert_eq!(release.is_some(), !self.queue.is_empty());
        if let Some(release) = release {
            prop_assert!(release > self.now && release <= self.now + self.settings.min_interval);
        }
        Ok(false)
    }

    fn came(&self, number: usize) -> bool {
        self.out.binary_search(&number).is_ok()
    }

    /// What must hold when everything that is left has come out.
    fn finish(mut self) -> Result<(), TestCaseError> {
        while !self.queue.is_empty() {
            while self.pop()? {}
            self.now += self.settings.min_interval;
        }
        prop_assert!(self.out.is_sorted_by(|a, b| a < b), "order: {:?}", self.out);
        let counts = self.queue.counts();
        prop_assert_eq!(counts.progress_in, counts.progress_out + counts.coalesced + counts.dropped);
        let mut newest = [i32::MIN; 3];
        for (number, pushed) in self.pushed.iter().enumerate() {
            match pushed.thin {
                None => prop_assert!(self.came(number), "{number} was lost"),
                Some((token, value)) if self.came(number) => {
                    prop_assert!(!pushed.stale && value > newest[token], "{number} does not rise");
                    newest[token] = value;
                }
                Some(_) if pushed.stale => {}
                Some((token, _)) => self.was_replaced(number, token)?,
            }
        }
        Ok(())
    }

    /// A progress event that did not come out was thinned, so one that is newer came before anything that is
    /// no progress; or it was dropped, and the stream is marked.
    fn was_replaced(&self, number: usize, token: usize) -> Result<(), TestCaseError> {
        prop_assert!(self.settings.coalesce);
        let later = || (number + 1..self.pushed.len()).map(|later| (self.pushed[later], self.came(later)));
        let newer = later()
            .take_while(|(pushed, _)| pushed.thin.is_some())
            .any(|(pushed, came)| came && pushed.thin.is_some_and(|thin| thin.0 == token));
        prop_assert!(newer || self.queue.counts().refetch, "{number} was thinned and is missed");
        let id = !self.pushed[number].id || later().any(|(pushed, came)| came && pushed.id);
        prop_assert!(id, "the id of {number} is lost");
        Ok(())
    }
}

proptest! {
    #[test]
    fn whatever_comes_the_rules_hold(settings in any_settings(), steps in steps(120)) {
        let mut run = Run::new(settings);
        for step in &steps {
            run.step(step)?;
        }
        run.finish()?;
    }

    #[test]
    fn without_a_rate_the_queue_does_what_the_rules_say_literally(
        capacity in 1..6_usize,
        steps in prop::collection::vec((0..3_usize, -1..3_i32, 0..10_u8), 0..100),
    ) {
        let now = Instant::now();
        let mut queue = Queue::new(Settings { queue: capacity, ..unlimited() });
        let mut list: Vec<(Option<usize>, String)> = Vec::new();
        let mut refetch = false;
        let mut values = [None::<i32>; 3];
        for (number, (token, rise, choice)) in steps.into_iter().enumerate() {
            let name = number.to_string();
            if choice > 7 {
                let expected = if list.is_empty() { None } else { Some(list.remove(0).1) };
                prop_assert_eq!(queue.pop(now).map(|popped| text(&popped.event)), expected);
                continue;
            }
            // Rule 4.
            let room = list.iter().filter(|item| item.0.is_none()).count() < capacity;
            prop_assert_eq!(queue.has_room(), room);
            if !room {
                continue;
            }
            let is_progress = choice > 0;
            if is_progress {
                let value = values[token].unwrap_or(0) + rise;
                queue.push(event(&name), progress(token as u64, f64::from(value)), now);
                // Rule 5.
                if values[token].is_some_and(|newest| value <= newest) {
                    continue;
                }
                values[token] = Some(value);
                // Rule 1.
                if list.last().is_some_and(|last| last.0 == Some(token)) {
                    list.pop();
                }
            } else {
                keep(&mut queue, &name, now);
            }
            // Rule 3.
            if list.len() == capacity {
                let oldest = list.iter().position(|item| item.0.is_some()).unwrap();
                list.remove(oldest);
                refetch = true;
            }
            list.push((is_progress.then_some(token), name));
        }
        prop_assert_eq!(queue.counts().refetch, refetch);
        let left: Vec<_> = list.into_iter().map(|item| item.1).collect();
        prop_assert_eq!(drain(&mut queue, now), left);
    }

    // Rule 2.
    #[test]
    fn a_reader_that_keeps_up_gets_the_burst_one_per_interval_and_always_the_last(
        burst in 1..6_u32,
        pauses in prop::collection::vec(0..70_u64, 1..80),
    ) {
        let mut now = Instant::now();
        let mut queue = Queue::new(Settings { burst, ..settings() });
        let mut out = Vec::new();
        for (value, pause) in (0_u32..).zip(&pauses) {
            now += millis(*pause);
            push(&mut queue, 1, f64::from(value), now);
            out.extend(drain(&mut queue, now).into_iter().map(|text| (now, text)));
        }
        while let Some(release) = queue.next_release() {
            now = now.max(release);
            out.extend(drain(&mut queue, now).into_iter().map(|text| (now, text)));
        }
        prop_assert_eq!(&out.last().unwrap().1, &format!("1:{}", pauses.len() - 1));
        for (first, (start, _)) in out.iter().enumerate() {
            for (more, (end, _)) in out[first..].iter().enumerate() {
                let refilled = (*end - *start).as_millis() / 100;
                prop_assert!(more as u128 <= u128::from(burst) + refilled);
            }
        }
    }
}
