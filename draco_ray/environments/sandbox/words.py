"""Word lists the sandbox's names and texts are drawn from."""

FIRST_NAMES = (
    "Aaron Bella Carmen Derek Elena Felix Grace Hugo Irene Jonas Karla Leon Maria Nolan Olivia Peter Quinn Rosa Simon "
    "Tessa Ursula Victor Wendy Xavier Yara Zane Amber Boris Celia Dylan"
).split()
LAST_NAMES = (
    "Adams Baker Carter Diaz Evans Foster Garcia Hughes Ingram Jensen Keller Lopez Morgan Novak Owens Parker Reyes "
    "Sanders Turner Vargas Walker Young Ziegler"
).split()
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
ALARM_LABELS = ["Wake up", "Gym", "Medicine", "Walk the dog", "Standup", "Lunch", "Study", "Call home"]
ARTIST_FIRST = "Crimson Velvet Silver Hollow Electric Northern Wild Quiet Golden Paper".split()
ARTIST_LAST = "Foxes Harbor Engine Choir Parade Ravens Theory Orchard Signal Mirrors".split()
GENRES = ["rock", "pop", "jazz", "indie", "classical", "folk", "hip-hop", "electronic"]
ADJECTIVES = (
    "Broken Distant Endless Faded Gentle Hidden Last Lonely Midnight Neon Open Perfect Quiet Restless Secret Sleepless "
    "Slow Tender Wandering Winter"
).split()
NOUNS = (
    "Avenue Bridges Candle Daylight Echoes Fires Garden Horizon Island Journey Kingdom Letters Mountain Nights Ocean "
    "Promise River Shadows Thunder Window"
).split()
PLAYLIST_TITLES = [
    "Morning Run",
    "Deep Focus",
    "Road Trip",
    "Rainy Day",
    "Dinner Party",
    "Gym Boost",
    "Late Night Drive",
    "Sunday Chill",
    "Study Session",
    "Summer Vibes",
    "Throwback Mix",
    "Coffee Break",
    "Beach Days",
    "Winter Evenings",
    "Garage Jams",
    "Piano Moods",
]
PAYMENT_REASONS = [
    "Dinner",
    "Groceries",
    "Concert tickets",
    "Rent",
    "Utilities",
    "Taxi ride",
    "Coffee",
    "Birthday gift",
    "Movie night",
    "Gas money",
]
NOTE_TOPICS = "Garden Kitchen Travel Budget Fitness Reading Birthday Project Car Apartment".split()
NOTE_KINDS = "ideas checklist plan log reminders".split()
NOTE_TAGS = ["home", "travel", "work", "health", "finance", "hobby"]
SENTENCES = [
    "Compare prices before deciding.",
    "Ask for a second opinion.",
    "Remember to take pictures.",
    "Keep the receipts.",
    "Start early in the morning.",
    "Check the weather first.",
    "Make a copy of the documents.",
    "Call to confirm the date.",
]
MESSAGES = [
    "Dinner is at eight tonight.",
    "I will be ten minutes late.",
    "Happy new month to you!",
    "Please call me back today.",
    "The meeting has moved to noon.",
    "I have changed my address.",
    "Game night is on Friday.",
    "Thanks for your help last week.",
]
NEW_TITLES = [
    "Best Of Mine",
    "Favorites Mix",
    "Top Picks",
    "Heart Songs",
    "All Time Loves",
    "My Collection",
    "Keepers",
    "Golden Hour",
]
