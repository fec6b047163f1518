// A listening TCP socket on a strand of its own.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>

#include "deltasync/result.hpp"
#include "net/endpoint.hpp"

namespace deltasync::net {

/// Resolves, binds and listens. Errors name the endpoint. Who may connect is the caller's to judge, by the address
/// that was bound.
Result<boost::asio::ip::tcp::acceptor> bind_acceptor(boost::asio::io_context& io, const Endpoint& where);

}  // namespace deltasync::net
