// One connection's TLS.
#pragma once

#include <memory>
#include <string>

#include "net/channel.hpp"
#include "net/tls_files.hpp"

namespace deltasync::net {

/// Borrows the socket; takes a share of the context.
Result<std::unique_ptr<Channel>> make_tls_channel(SSL_CTX* context, TlsRole role,
                                                  std::shared_ptr<const TlsOptions> options, int fd, std::string peer);

}  // namespace deltasync::net
