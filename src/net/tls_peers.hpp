// The peers of a server's connections whose certificates were asked for. They are verified again when the files have
// been read again: who would be let in no more is disconnected.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "net/tls_files.hpp"

namespace deltasync::net {

/// Thread-safe.
class TlsPeers {
 public:
  /// From the end of a connection's handshake to the connection's end.
  class Peer {
   public:
    /// `end` is called by any thread, at most once, and must not wait. Nothing of `ssl` is used but what it has now.
    Peer(std::shared_ptr<TlsPeers> all, const SSL* ssl, std::string name, std::function<void()> end);
    ~Peer();
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

   private:
    friend class TlsPeers;
    const std::shared_ptr<TlsPeers> all_;
    const std::string name_;
    const std::unique_ptr<X509, FreeSsl> certificate_;
    const std::unique_ptr<STACK_OF(X509), FreeSsl> chain_;
    std::function<void()> end_;  // protected by all_->mutex_; empty once it was called
  };

  /// From now on `context` says who is let in.
  void verify_by(SSL_CTX* context);

 private:
  void verify_locked(Peer& peer) const;

  std::mutex mutex_;
  SslContextPtr context_;  // protected by mutex_, as all_; null: the one that each was let in by
  std::set<Peer*> peers_;
};

}  // namespace deltasync::net
