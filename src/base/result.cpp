#include "deltasync/result.hpp"

#include <cerrno>
#include <system_error>

namespace deltasync {

std::string_view to_string(Errc code) noexcept {
  switch (code) {
    case Errc::invalid_argument: return "invalid_argument";
    case Errc::out_of_range: return "out_of_range";
    case Errc::corrupt: return "corrupt";
    case Errc::unsupported: return "unsupported";
    case Errc::layout_mismatch: return "layout_mismatch";
    case Errc::version_conflict: return "version_conflict";
    case Errc::coverage: return "coverage";
    case Errc::gone: return "gone";
    case Errc::lease_revoked: return "lease_revoked";
    case Errc::timed_out: return "timed_out";
    case Errc::aborted: return "aborted";
    case Errc::quarantined: return "quarantined";
    case Errc::peer_died: return "peer_died";
    case Errc::connection: return "connection";
    case Errc::protocol: return "protocol";
    case Errc::unauthenticated: return "unauthenticated";
    case Errc::already_exists: return "already_exists";
    case Errc::not_found: return "not_found";
    case Errc::permission: return "permission";
    case Errc::no_space: return "no_space";
    case Errc::io: return "io";
    case Errc::internal: return "internal";
    case Errc::cancelled: return "cancelled";
  }
  return "unknown";
}

Error Error::from_errno(std::string_view what, int errnum) {
  const auto code = [&] {
    switch (errnum) {
      case ENOSPC:
      case EDQUOT:
      case ENOMEM: return Errc::no_space;
      case EACCES:
      case EPERM: return Errc::permission;
      case ENOENT: return Errc::not_found;
      case EEXIST: return Errc::already_exists;
      case ETIMEDOUT: return Errc::timed_out;
      case ECONNREFUSED:
      case ECONNRESET:
      case EPIPE:
      case ECONNABORTED:
      case EHOSTUNREACH:
      case ENETUNREACH:
      case ENOTCONN: return Errc::connection;
      case EINVAL: return Errc::invalid_argument;
      default: return Errc::io;
    }
  }();
  return {code, std::string(what) + ": " + std::generic_category().message(errnum)};
}

}  // namespace deltasync
