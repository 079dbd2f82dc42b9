// Package socket bounds how long a connection outlives its peer, and makes small answers cheap. It
// is for the parts with connections of their own: the pools of PostgreSQL, the connections to NATS,
// and the listeners.
package socket
