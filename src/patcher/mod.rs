//! patcher
