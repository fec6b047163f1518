// One GET over HTTP or HTTPS with a deadline: how `deltasync status`, `inspect` and `trace` ask a live process.
#pragma once

#include <string>

#include "base/deadline.hpp"
#include "deltasync/result.hpp"
#include "deltasync/tls.hpp"
#include "net/endpoint.hpp"

namespace deltasync::tools {

/// Where pages are.
struct HttpSource {
  net::Endpoint endpoint;
  TlsOptions tls;  ///< a client's; none: plain HTTP
};
/// "HOST:PORT", or "http://" or "https://" before it and perhaps "/" behind it. https:// is over TLS, as is HOST:PORT
/// if `tls` names a CA; http:// is not. invalid_argument, naming the text, also if nothing says whom to trust, and for
/// http:// with options of TLS.
Result<HttpSource> parse_http_source(const std::string& text, const TlsOptions& tls);
/// Begins with http:// or https://, in whatever case.
bool is_http_url(std::string text);

/// The body of a 200 answer of at most 256 MiB. `protocol` for anything else; the message has the status and the first
/// line of the body.
Result<std::string> http_get(const HttpSource& source, const std::string& target, Deadline deadline);

}  // namespace deltasync::tools
