//! What all sidecars on one store share and nobody else knows: it keys the hashes of credentials, and marks the progress
//! tokens that they add.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::Ledger;
use crate::{
    call::key::hex,
    message::Id,
    store::{self, Name, Table, View, Write, update_with},
};

/// What all that share the store share. Its `Debug` prints nothing of it.
pub(super) struct Secret {
    key: [u8; 32],
    tag: String,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// What all tokens of ours begin with.
const TOKEN_PREFIX: &str = "mcp-sidecar/";

impl Ledger {
    /// What must be the same for all that share the store: made once, by whoever comes first.
    pub(super) async fn secret(&self) -> Result<&Secret, store::Error> {
        self.secret
            .get_or_try_init(|| async {
                let fresh = fresh_secret()?;
                let names = vec![Name::new(Table::Secrets, "principal")];
                let key = update_with(&*self.store, names, move |view: &View<'_>| {
                    match view
                        .records
                        .first()
                        .copied()
                        .flatten()
                        .and_then(|held| <[u8; 32]>::try_from(held).ok())
                    {
                        Some(held) => (vec![Write::Keep], held),
                        None => (vec![Write::Put { value: fresh.to_vec(), expires: None }], fresh),
                    }
                })
                .await;
                let key = self.watch(key)?;
                let tag = keyed(&key, b"tag")[..8].to_owned();
                Ok(Secret { key, tag })
            })
            .await
    }

    /// Whose a call is: a keyed hash of the `Authorization` that the node sent, none being one too.
    ///
    /// # Errors
    ///
    /// The store is away, and was when the process began.
    pub async fn principal(&self, authorization: Option<&[u8]>) -> Result<String, store::Error> {
        let secret = self.secret().await?;
        Ok(match authorization {
            Some(value) => keyed(&secret.key, &[b"authorization ", value].concat()),
            None => keyed(&secret.key, b"none"),
        })
    }

    /// A progress token that no client has, and that every sidecar on this store knows for one of theirs.
    ///
    /// # Errors
    ///
    /// As [`Ledger::principal`].
    pub async fn progress_token(&self) -> Result<String, store::Error> {
        let tag = &self.secret().await?.tag;
        Ok(format!("{TOKEN_PREFIX}{tag}/{:032x}", fastrand::u128(..)))
    }

    /// Whether a progress token is one that a sidecar on this store added. While the store's tag is not known any token of
    /// that form counts as one: better one too many is kept back than one shown to a node that did not offer it.
    pub fn is_own_token(&self, token: &Id) -> bool {
        match self.secret.get() {
            Some(secret) => token.has_prefix(&format!("{TOKEN_PREFIX}{}/", secret.tag)),
            None => token.has_prefix(TOKEN_PREFIX),
        }
    }
}

/// HMAC-SHA256, 32 hex digits of it.
fn keyed(key: &[u8; 32], message: &[u8]) -> String {
    // A key of any length fits.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return String::new() };
    mac.update(message);
    hex(&mac.finalize().into_bytes()[..16])
}

/// 32 bytes from the TLS provider's generator: they key hashes of credentials.
fn fresh_secret() -> Result<[u8; 32], store::Error> {
    let mut secret = [0; 32];
    let random = rustls::crypto::aws_lc_rs::default_provider().secure_random;
    random.fill(&mut secret).map_err(|_| store::Error::Unavailable("the system has no randomness".into()))?;
    Ok(secret)
}
