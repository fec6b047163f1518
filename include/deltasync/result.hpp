// How calls begin and end. Every call that can fail returns a Result, and every call that can wait takes CallOptions.
// An Error has a closed code, on which a program branches, and a message for people, which grows a prefix at each hop.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stop_token>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

namespace deltasync {

/// What went wrong, in the terms in which a caller can react. The list is closed: a new condition gets one of these.
enum class Errc : std::uint8_t {
  invalid_argument,  ///< the caller passed something that can never work
  out_of_range,      ///< an index, slice or offset outside its tensor, tile grid or region
  corrupt,           ///< bytes that fail a hash, a digest or a structural bound
  unsupported,       ///< well-formed, but of a format version, dtype or codec that this build does not know
  layout_mismatch,   ///< the layout digest differs from the expected one (receivers bind again)
  version_conflict,  ///< a version that does not follow the current one, or a second epoch beside the first
  coverage,          ///< a tensor or a part of one was written twice or never
  gone,              ///< the named version is past and no longer reachable; the message lists what exists
  lease_revoked,     ///< the half being read was needed by the writer; replan
  timed_out,         ///< the deadline passed; the message names what was waited for
  aborted,           ///< the fill was aborted (by this process or another writer)
  quarantined,       ///< the half is held by a stopped writer; the message names its pid
  peer_died,         ///< a process was proved dead (pidfd)
  connection,        ///< refused, reset, closed early, unreachable
  protocol,          ///< the peer sent something that the protocol does not allow
  unauthenticated,   ///< no token, a wrong token, or a bind that would need one
  already_exists,    ///< a second agent, a segment or file in the way
  not_found,         ///< no such file, segment, tensor
  permission,        ///< wrong owner or mode
  no_space,          ///< disk, /dev/shm or cgroup limit
  io,                ///< any other operating-system error; the message has errno's text
  internal,          ///< a broken invariant that was caught; a bug
  cancelled,         ///< the caller asked the call to stop (std::stop_token); never sent over the wire
};

/// Stable lower-case name of a code, e.g. "lease_revoked".
std::string_view to_string(Errc code) noexcept;

/// Why a call failed. A value: cheap to move, never empty, without a lock.
class [[nodiscard]] Error {
 public:
  Error(Errc code, std::string message) : code_(code), message_(std::move(message)) {}

  /// The current errno (or `errnum`) as an Error: ENOSPC → no_space, EACCES → permission, ETIMEDOUT → timed_out …
  static Error from_errno(std::string_view what, int errnum);

  Errc code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

  /// The same error with "context: " put before the message: "pull v12: tile 88: payload hash differs".
  Error with_context(std::string_view context) && {
    message_.insert(0, std::string(context) + ": ");
    return std::move(*this);
  }

  /// "code: message"
  std::string to_string() const { return std::string(deltasync::to_string(code_)) + ": " + message_; }

 private:
  Errc code_;
  std::string message_;
};

namespace detail {
[[noreturn]] inline void die_on_wrong_result(const char* what, const char* message) noexcept {
  std::fprintf(stderr, "deltasync: %s: %s\n", what, message);
  std::abort();
}
}  // namespace detail

/// What a call returned, or why it failed. Thread-safe as T is. Reading the wrong one of the two ends the process with
/// the message on stderr.
///
/// ```cpp
/// const Result<LayoutPtr> layout = Layout::build({{.name = "w", .dtype = Dtype::f32, .shape = {4, 4}}});
/// if (!layout) std::fprintf(stderr, "%s\n", layout.error().to_string().c_str());
/// ```
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::in_place_index<0>, std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : v_(std::in_place_index<1>, std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const noexcept { return v_.index() == 0; }
  explicit operator bool() const noexcept { return ok(); }

  /// The value; also by `*` and `->`.
  T& value() & { return check(), *std::get_if<0>(&v_); }
  const T& value() const& { return check(), *std::get_if<0>(&v_); }
  T&& value() && { return check(), std::move(*std::get_if<0>(&v_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  const Error& error() const& { return check_error(), *std::get_if<1>(&v_); }
  Error&& error() && { return check_error(), std::move(*std::get_if<1>(&v_)); }

  /// On failure, the error with a context prefix; on success, unchanged.
  Result with_context(std::string_view context) && {
    if (!ok()) return std::move(*this).error().with_context(context);
    return std::move(*this);
  }

 private:
  void check() const {
    if (!ok()) detail::die_on_wrong_result("value() of a failed Result", std::get_if<1>(&v_)->message().c_str());
  }
  void check_error() const {
    if (ok()) detail::die_on_wrong_result("error() of a successful Result", "");
  }
  std::variant<T, Error> v_;
};

/// Success has no value.
template <>
class [[nodiscard]] Result<void> : public Result<std::monostate> {
 public:
  Result() : Result<std::monostate>(std::monostate()) {}
  Result(Error error) : Result<std::monostate>(std::move(error)) {}  // NOLINT(google-explicit-constructor)
  Result with_context(std::string_view context) && {
    if (!ok()) return std::move(*this).error().with_context(context);
    return {};
  }
};
using Status = Result<void>;

/// How long a call may take, and what ends it sooner. `{}` sets no limit: the call takes as long as it needs.
///
/// ```cpp
/// const auto in_a_minute = std::chrono::steady_clock::now() + std::chrono::minutes(1);
/// auto update = receiver.pull({.newer = true}, {.deadline = in_a_minute, .stop = stop});
/// auto other = receiver.pull({.newer = true}, CallOptions::within(std::chrono::minutes(1)));
/// ```
struct CallOptions {
  /// When the call fails with Errc::timed_out, naming what it waited for. It begins nothing then that would go on.
  /// By default there is no deadline. One that has passed already makes a call look once, and not wait.
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  /// Ends the call soon after any thread requested it, or at once if it was requested before, with Errc::cancelled. A
  /// call that has failed for another reason by then says that reason. What it leaves behind is what it would leave at
  /// its deadline. By default nothing stops the call.
  std::stop_token stop = {};

  /// A deadline so long from now.
  static CallOptions within(std::chrono::nanoseconds limit, std::stop_token stop = {}) {
    return {.deadline = std::chrono::steady_clock::now() + limit, .stop = std::move(stop)};
  }
};

}  // namespace deltasync

/// Propagates a failed Status / Result: `DS_TRY(x.flush());`
#define DS_TRY(expr)                                                  \
  do {                                                                \
    auto ds_try_result = (expr);                                      \
    if (!ds_try_result.ok()) return std::move(ds_try_result).error(); \
  } while (false)

/// Declares `var` from a Result or propagates its error: `DS_ASSIGN(auto fd, open(path));`
#define DS_ASSIGN(decl, expr) DS_ASSIGN_IMPL_(decl, expr, DS_CAT_(ds_assign_, __LINE__))
#define DS_CAT_(a, b) DS_CAT2_(a, b)
#define DS_CAT2_(a, b) a##b
#define DS_ASSIGN_IMPL_(decl, expr, tmp)        \
  auto tmp = (expr);                            \
  if (!tmp.ok()) return std::move(tmp).error(); \
  decl = std::move(tmp).value()
