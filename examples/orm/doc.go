// Package orm shows how a service with GORM or bun appends events in the transaction of its own
// rows. It is a module of its own, so Tidings does not depend on these libraries.
package orm
