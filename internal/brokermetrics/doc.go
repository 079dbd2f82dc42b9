// Package brokermetrics exports the sizes of the streams and the life of credentials. It is for the
// processes of Tidings. It is apart from internal/broker, which subscribers' programs link: those
// have no use for Prometheus' library.
package brokermetrics
