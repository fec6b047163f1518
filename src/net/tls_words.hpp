// What goes wrong with TLS, in the words of who runs an agent: the file, the name, the option.
#pragma once

#include <string>

#include "deltasync/result.hpp"
#include "net/tls_files.hpp"

namespace deltasync::net {

/// Why a peer's certificate was refused: OpenSSL's `error` of the one that is so deep in its chain (0: its own). A
/// client `expected` it to be for this host.
std::string tls_refusal(int error, X509* certificate, int depth, const TlsOptions& options,
                        const std::string& expected);

/// OpenSSL's `code`, when an operation failed.
Error tls_error(unsigned long code, TlsRole role);

/// Of a peer that was dialled and answered a handshake with something else.
Error speaks_no_tls();

}  // namespace deltasync::net
