// Package socket bounds how long a connection outlives its peer. It is for the parts with
// connections of their own: the pools of PostgreSQL, and the listeners.
package socket
