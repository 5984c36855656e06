//! What is counted where it is used, and read only when somebody asks: so that a gauge costs an exchange nothing.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::store::BoxFuture;

/// What has to be found out before a page is shown. It must end soon by itself.
pub type Look = BoxFuture<'static, ()>;

/// How a number behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It rises and falls.
    Gauge,
    /// It only rises.
    Counter,
}

type Read = Box<dyn Fn() -> Vec<(String, usize)> + Send + Sync>;

/// One metric.
pub(super) struct Measured {
    kind: Kind,
    name: &'static str,
    help: &'static str,
    /// None: there is one sample, without a label.
    label: Option<&'static str>,
    read: Read,
}

impl Measured {
    pub(super) fn one(
        kind: Kind,
        name: &'static str,
        help: &'static str,
        read: impl Fn() -> usize + Send + Sync + 'static,
    ) -> Self {
        Self { kind, name, help, label: None, read: Box::new(move || vec![(String::new(), read())]) }
    }

    pub(super) fn each(
        kind: Kind,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        read: impl Fn() -> Vec<(String, usize)> + Send + Sync + 'static,
    ) -> Self {
        Self { kind, name, help, label: Some(label), read: Box::new(read) }
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Gauge => MetricType::Gauge,
            Kind::Counter => MetricType::Counter,
        };
        let mut encoder = encoder.encode_descriptor(self.name, self.help, None, kind)?;
        for (value, number) in (self.read)() {
            let labels: Vec<_> = self.label.map(|label| (label, value.as_str())).into_iter().collect();
            self.sample(number, encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn sample(&self, number: usize, encoder: MetricEncoder<'_>) -> fmt::Result {
        match self.kind {
            Kind::Gauge => ConstGauge::new(i64::try_from(number).unwrap_or(i64::MAX)).encode(encoder),
            Kind::Counter => ConstCounter::new(number as u64).encode(encoder),
        }
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct Measures {
    all: Mutex<Vec<Measured>>,
    looks: Mutex<Vec<Box<dyn Fn() -> Look + Send + Sync>>>,
}

impl Measures {
    pub(super) fn add(&self, measured: Measured) {
        lock(&self.all).push(measured);
    }

    pub(super) fn look_first(&self, look: impl Fn() -> Look + Send + Sync + 'static) {
        lock(&self.looks).push(Box::new(look));
    }

    /// Ends when all that has to be found out has been.
    pub(super) async fn look(&self) {
        let looks: Vec<Look> = lock(&self.looks).iter().map(|look| look()).collect();
        for look in looks {
            look.await;
        }
    }
}

impl fmt::Debug for Measures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Measures").field(&lock(&self.all).len()).finish()
    }
}

impl Collector for Measures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        lock(&self.all).iter().try_for_each(|measured| measured.encode(&mut encoder))
    }
}

/// A poisoned lock only means that a reader panicked: the list is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
