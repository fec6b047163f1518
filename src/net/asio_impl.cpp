// The one translation unit that holds Asio's and Beast's code (separate compilation).
#include <boost/asio/impl/src.hpp>
#include <boost/beast/src.hpp>
