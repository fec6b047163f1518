// One connection's TLS.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "net/channel.hpp"
#include "net/tls.hpp"
#include "net/tls_files.hpp"
#include "net/tls_peers.hpp"

namespace deltasync::net {

/// Of one end.
struct TlsSide {
  TlsRole role;
  std::shared_ptr<const TlsOptions> options;
  LetsIn lets_in = LetsIn::as_options_say;  ///< a server's
  std::shared_ptr<TlsPeers> peers;          ///< of it
  std::function<void()> end;                ///< as Tls::channel() has it

  bool asks() const { return role == TlsRole::client || (!options->ca.empty() && lets_in != LetsIn::everybody); }
  bool by_name() const { return role == TlsRole::server && lets_in == LetsIn::as_options_say; }
};

/// Borrows the socket; takes a share of the context.
Result<std::unique_ptr<Channel>> make_tls_channel(SSL_CTX* context, TlsSide side, int fd, std::string peer);

}  // namespace deltasync::net
