#include "net/tls_peers.hpp"

#include <openssl/err.h>
#include <openssl/x509_vfy.h>

#include <utility>

#include "base/log.hpp"

namespace deltasync::net {
namespace {

struct FreeStore {
  void operator()(X509_STORE_CTX* store) const { ::X509_STORE_CTX_free(store); }
};

/// As a handshake does; X509_V_OK: the peer is let in.
int verdict_of(SSL_CTX* context, X509* certificate, STACK_OF(X509) * chain) {
  const std::unique_ptr<X509_STORE_CTX, FreeStore> store(::X509_STORE_CTX_new());
  if (!store || ::X509_STORE_CTX_init(store.get(), ::SSL_CTX_get_cert_store(context), certificate, chain) != 1 ||
      ::X509_STORE_CTX_set_default(store.get(), "ssl_client") != 1) {
    return X509_V_ERR_OUT_OF_MEM;
  }
  X509_VERIFY_PARAM* const param = ::X509_STORE_CTX_get0_param(store.get());
  ::X509_VERIFY_PARAM_set_auth_level(param, ::SSL_CTX_get_security_level(context));
  if (::X509_verify_cert(store.get()) == 1) return X509_V_OK;
  const int error = ::X509_STORE_CTX_get_error(store.get());
  return error == X509_V_OK ? X509_V_ERR_UNSPECIFIED : error;
}

}  // namespace

TlsPeers::Peer::Peer(std::shared_ptr<TlsPeers> all, const SSL* ssl, std::string name, std::function<void()> end)
    : all_(std::move(all)),
      name_(std::move(name)),
      certificate_(::SSL_get_peer_certificate(ssl)),
      chain_(::X509_chain_up_ref(::SSL_get_peer_cert_chain(ssl))),
      end_(std::move(end)) {
  const std::lock_guard lock(all_->mutex_);
  all_->peers_.insert(this);
  // Its handshake may have been under way, by the files of before.
  if (all_->context_ && ::SSL_get_SSL_CTX(ssl) != all_->context_.get()) all_->verify_locked(*this);
}

TlsPeers::Peer::~Peer() {
  const std::lock_guard lock(all_->mutex_);
  all_->peers_.erase(this);
}

void TlsPeers::verify_by(SSL_CTX* context) {
  ::SSL_CTX_up_ref(context);
  const std::lock_guard lock(mutex_);
  context_.reset(context);
  for (Peer* const peer : peers_) verify_locked(*peer);
}

void TlsPeers::verify_locked(Peer& peer) const {
  if (!peer.end_) return;
  const int verdict = verdict_of(context_.get(), peer.certificate_.get(), peer.chain_.get());
  ::ERR_clear_error();
  if (verdict == X509_V_OK) return;
  log::warn("tls_peer_disconnected peer={} names=\"{}\" reason=\"{}\"", peer.name_, names_of(peer.certificate_.get()),
            ::X509_verify_cert_error_string(verdict));
  std::exchange(peer.end_, nullptr)();
}

}  // namespace deltasync::net
