//! health and readiness
