// Which questions a browser asks for a page of somebody else. Without a token a server on loopback trusts this host's
// own programs, of which a browser is one that does what any site tells it.
#pragma once

#include <string>
#include <string_view>

#include "net/http_server.hpp"

namespace deltasync::control {

/// Why the question may be such a page's; empty: it is none.
///   - Host has to name the server by a loopback address, or as it listens: other names may be a site's that has its
///     DNS point here (rebinding). With TLS the browser has compared the name with the certificate.
///   - Origin, where there is one, has to be that of the server itself.
///   - Sec-Fetch-Site has to be none or same-origin: a link or an image is asked for without an Origin.
std::string foreign_page(const net::HttpQuestion& asked, std::string_view listen_host, bool tls);

}  // namespace deltasync::control
