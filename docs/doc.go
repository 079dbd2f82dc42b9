// Package docs compares the documents with the code. It is for those who change a page or a name
// that a page has. It has only tests.
package docs
